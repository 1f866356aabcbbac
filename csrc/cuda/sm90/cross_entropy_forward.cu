#include "../../plan/tiles.h"
#include "../cross_entropy_passes.cuh"
#include "../engine.h"
#include "cross_entropy_saving.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/path_counter.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Tile = ContractionTile<256, 4>;
static_assert(kSizesOf<Tile> == tiles::kSm90Loss);
static_assert(kStateFloats<CrossEntropy<Bits>> == kStateFloats<CrossEntropy<float>>);
static_assert(kStateFloats<LogSumExp<Bits>> == kStateFloats<LogSumExp<float>>);

}  // namespace

template <>
void run(const CrossEntropyKeptGradients& x, const Plan&, const Launch& launch) {
  with_element(x.x.dtype, [&](auto element) {
    const auto kept = kept_weights<Tile>(x.kept, static_cast<float*>(x.frames.data));
    to_gradients<decltype(element)>(x, kept, cross_entropy_problem(x), launch);
  });
}

template <>
void run(const CrossEntropyForward& x, const Plan& plan, const Launch& launch) {
  if (!x.kept.present()) return cross_entropy_forward_pass<Tile, true>(x, launch);
  cross_entropy_forward_saving<Tile>(x, plan, launch);
  // The forward pass has done a part of the backward pass.
  count_path("cross_entropy_backward", "cuda", "sm90", false, name(x.x.dtype));
}

template <>
void run(const LogSumExpForward& x, const Plan& plan, const Launch& launch) {
  if (plan.narrow) return logsumexp_mean(x, launch);
  logsumexp_forward_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm90
