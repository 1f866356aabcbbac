#include "../distillation.h"
#include "../element.h"
#include "linear_losses.h"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/weights_to_gradients.cuh"
#include "monoidreduce/problems.h"
#include "monoidreduce/rows.h"
#include "natural.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Tile = ContractionTile<192, 5, 2>;
// A stage less: slabs take its place.
using KeepingTile = ContractionTile<192, 4, 2>;

template <DistillationLoss kLoss>
struct DistillationResults {
  DistillationRows<float, kLoss> rows;
  using State = typename Distillation<Bits, kLoss>::State;
  __device__ std::int64_t label(std::int64_t) const { return -1; }
  __device__ void store(std::int64_t row, const State& s) const {
    // In bits: there the frames are the very scores that the expectation is made of, and equal ones cancel.
    using R = AccurateBits;
    const auto side = [](LogSumExp<Bits>::State x) -> LogSumExp<R>::State { return {x.frame.x, x.mass.x}; };
    const auto p = Distillation<R, kLoss>{}.project({side(s.student), side(s.teacher), s.cross.x});
    const auto lse = [](LogNumber<R> x) {
      return rounded<float>(LogNumber<double>{(double{x.high.x} + x.low.x) * kLn2, 0.});
    };
    rows.store(row, {lse(p.student_lse), lse(p.teacher_lse), static_cast<float>(natural(p.expectation)),
                     static_cast<float>(natural(p.loss))});
  }
};

// The gradient by the student's scores, of the losses under the teacher: share of student - share of teacher.
struct DistillationTerms {
  DistillationRows<float, DistillationLoss::kForwardKL> rows;
  __device__ bool active(std::int64_t row) const { return rows.active(row); }
  __device__ RowTerms<2> terms(std::int64_t row) const {
    const auto p = rows.product(row);
    const float upstream = rows.upstream(row);
    return {.lse = {bits(p.student_lse), bits(p.teacher_lse)}, .factor = {upstream, -upstream}};
  }
};

// Floats of partial states.
std::int64_t states_of(const FoldProblem& p) {
  using M = Distillation<Bits, DistillationLoss::kCrossEntropy>;  // all have the same state
  return partial_bytes<M, Tile>(contraction_schedule<Tile>(p)) / static_cast<std::int64_t>(sizeof(float));
}

// What is kept of a call, its frames after `before` floats of the scratch.
KeptWeights<2> kept_of(const DistillationForward& x, std::int64_t before) {
  KeptWeights<2> kept{
      .weights = {static_cast<__half*>(x.kept.data), static_cast<__half*>(x.teacher_kept.data)},
      .frames = {},
      .pitch = x.kept.stride[0],
      .columns = static_cast<int>(x.kept.size[1]),
      .tile_columns = KeepingTile::kColumns};
  kept.frames[0] = static_cast<float*>(x.scratch.data) + before;
  kept.frames[1] = kept.frames[0] + x.x.size[0] * kept.tiles();
  return kept;
}

template <DistillationLoss kLoss>
DistillationRows<float, kLoss> rows_of(const DistillationForward& x) {
  return {.mask = static_cast<const bool*>(x.mask.data),
          .mask_stride = x.mask.stride[0],
          .rows = x.x.size[0],
          .loss = static_cast<float*>(x.loss.data),
          .stats = static_cast<float*>(x.stats.data),
          .grad_loss = {static_cast<float*>(x.kept_upstream.data), 0}};
}

}  // namespace

std::int64_t distillation_forward_scratch(const DistillationForward& x) {
  const std::int64_t states = states_of(distillation_problem(x));
  return x.kept.present() ? states + 2 * x.x.size[0] * kept_of(x, states).tiles() : states;
}

void distillation_forward(const DistillationForward& x, const Launch& launch) {
  const FoldProblem problem = distillation_problem(x);
  const ScaledScores<Bits> scores(problem.score, kLog2E);
  with_element(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    with_loss(x.options.loss, [&](auto loss) {
      const Distillation<Bits, loss()> m;
      const DistillationResults<loss()> results{rows_of<loss()>(x)};
      if constexpr (loss() != DistillationLoss::kReverseKL) {
        if (x.kept.present()) {
          const KeptWeights<2> kept = kept_of(x, states_of(problem));
          fold_keeping<E, KeepingTile>(m, scores, problem, results, x.scratch.data, kept, launch);
          return weights_to_gradients<E>(kept, DistillationTerms{rows_of<DistillationLoss::kForwardKL>(x)},
                                         problem, launch);
        }
      }
      fold_contraction<E, Tile>(m, scores, problem, results, x.scratch.data, launch);
    });
  });
}

}  // namespace monoidreduce::cuda::sm90
