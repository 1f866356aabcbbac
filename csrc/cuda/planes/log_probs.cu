// Log-probabilities of float32 operands: the fold, and dlogits.
#include "../engine.h"
#include "../log_probs_passes.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"

namespace monoidreduce::cuda::planes {

using namespace monoidreduce::sm90;

template <>
void run(const LogProbsForward& x, const Plan&, const Launch& launch) {
  log_probs_forward_pass<PlaneTile<>, true, true>(x, launch);
}
template <>
void run(const LogProbsLocalGradient& x, const Plan&, const Launch& launch) {
  log_probs_gradient_pass<PlaneTile<>>(x, launch);
}

}  // namespace monoidreduce::cuda::planes
