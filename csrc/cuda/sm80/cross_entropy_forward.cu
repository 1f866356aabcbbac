#include "../cross_entropy_passes.cuh"
#include "../linear_losses.h"
#include "monoidreduce/launch/contraction_sm80.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using Tile = monoidreduce::sm80::ContractionTile<2>;

}  // namespace

std::int64_t cross_entropy_forward_scratch(const CrossEntropyForward& x) {
  return fold_floats<CrossEntropy<Bits>, Tile>(cross_entropy_problem(x));
}
std::int64_t logsumexp_forward_scratch(const LogSumExpForward& x) {
  return fold_floats<LogSumExp<Bits>, Tile>(logsumexp_problem(x));
}

void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch) {
  cross_entropy_forward_pass<Tile, false>(x, launch);
}

void logsumexp_forward(const LogSumExpForward& x, const Launch& launch) {
  logsumexp_forward_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm80
