#include "../../plan/tiles.h"
#include "../cross_entropy_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/contraction_sm80.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using Tile = monoidreduce::sm80::ContractionTile<2>;
static_assert(kSizesOf<Tile> == tiles::kSm80Loss);
static_assert(kStateFloats<CrossEntropy<Bits>> == kStateFloats<CrossEntropy<float>>);
static_assert(kStateFloats<LogSumExp<Bits>> == kStateFloats<LogSumExp<float>>);

}  // namespace

template <>
void run(const CrossEntropyForward& x, const Plan&, const Launch& launch) {
  cross_entropy_forward_pass<Tile, false>(x, launch);
}

template <>
void run(const LogSumExpForward& x, const Plan& plan, const Launch& launch) {
  if (plan.narrow) return logsumexp_mean(x, launch);
  logsumexp_forward_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm80
