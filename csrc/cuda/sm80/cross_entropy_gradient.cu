#include "../cross_entropy_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/contraction_sm80.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using Tile = monoidreduce::sm80::ContractionTile<2>;

}  // namespace

template <>
void run(const CrossEntropyLocalGradient& x, const Plan&, const Launch& launch) {
  cross_entropy_gradient_pass<Tile>(x, launch);
}

template <>
void run(const LogSumExpLocalGradient& x, const Plan&, const Launch& launch) {
  logsumexp_gradient_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm80
