#include "../../plan/tiles.h"
#include "../engine.h"
#include "../log_probs_passes.cuh"
#include "monoidreduce/launch/contraction_sm80.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using Tile = monoidreduce::sm80::ContractionTile<2>;
static_assert(kSizesOf<Tile> == tiles::kSm80Loss);
static_assert(kStateFloats<TopLogProbs<Bits>> == kStateFloats<TopLogProbs<float>>);

}  // namespace

template <>
void run(const LogProbsForward& x, const Plan&, const Launch& launch) {
  log_probs_forward_pass<Tile, false, false>(x, launch);
}

template <>
void run(const LogProbsLocalGradient& x, const Plan&, const Launch& launch) {
  log_probs_gradient_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm80
