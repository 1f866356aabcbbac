#include "../../plan/tiles.h"
#include "../distillation_passes.cuh"
#include "../engine.h"
#include "../gathered_rows.h"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/launch/saving_epilogue_sm90.cuh"
#include "monoidreduce/launch/weights_to_gradients.cuh"
#include "monoidreduce/path_counter.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Tile = ContractionTile<192, 5, 2>;
static_assert(kSizesOf<Tile> == tiles::kSm90Distillation);
static_assert(kStateFloats<NamedDistillation<Bits>> == kStateFloats<NamedDistillation<float>>);
// One stage less than Tile, to make room for the staging slabs of the stores.
using KeepingTile = ContractionTile<192, 4, 2>;
static_assert(KeepingTile::kColumns == Tile::kColumns);
using Kept = KeptWeights<2, KeepingTile::kColumns>;

// The gradient with respect to the student's scores, for the losses under the teacher: the student's p less
// the teacher's.
struct DistillationTerms {
  DistillationRows<float> rows;
  float kept_upstream;
  __device__ bool active(std::int64_t row) const { return rows.active(row); }
  __device__ RowTerms<2> terms(std::int64_t row) const {
    const auto p = rows.product(row);
    return {.lse = {bits(p.p_lse), bits(p.q_lse)}, .factor = {kept_upstream, -kept_upstream}};
  }
};
template <class Call>
DistillationTerms terms_of(const Call& x) {
  return {rows_of(x), static_cast<float>(x.kept_upstream)};
}

template <class Call>
Kept kept_of(const Call& x, float* frames) {
  Kept kept{.weights = {static_cast<__half*>(x.kept.data), static_cast<__half*>(x.teacher_kept.data)},
            .frames = {},
            .pitch = x.kept.stride[0],
            .columns = static_cast<int>(x.kept.size[1])};
  kept.frames[0] = frames, kept.frames[1] = frames + x.x.size[0] * kept.tiles();
  return kept;
}

}  // namespace

template <>
void run(const DistillationForward& x, const Plan& plan, const Launch& launch) {
  const FoldProblem problem = distillation_problem(x);
  distillation_forward_pass<Tile>(x, [&](auto element, const auto& m, const auto& scores, const auto& rows) {
    using E = decltype(element);
    if (!x.kept.present()) {
      return in_gathered_parts(x, problem, launch, [&](const FoldProblem& part) {
        fold_contraction<E, Tile>(m, scores, part, rows, x.scratch.data, launch);
      });
    }
    const Kept kept = kept_of(x, static_cast<float*>(x.scratch.data) + plan.saved.frames);
    in_gathered_parts(x, problem, launch, [&](const FoldProblem& part) {
      fold_and_save<E, KeepingTile>(m, scores, part, rows, x.scratch.data, kept.from(part.first_place),
                                    launch);
    });
    if (x.kept_upstream != 0) weights_to_gradients<E>(kept, terms_of(x), problem, launch);
    // The forward pass has done a part of the backward pass.
    count_path("distillation_backward", "cuda", "sm90", false, name(x.x.dtype));
  });
}

template <>
void run(const DistillationKeptGradients& x, const Plan&, const Launch& launch) {
  with_element(x.x.dtype, [&](auto element) {
    weights_to_gradients<decltype(element)>(kept_of(x, static_cast<float*>(x.frames.data)), terms_of(x),
                                            distillation_problem(x), launch);
  });
}

}  // namespace monoidreduce::cuda::sm90
