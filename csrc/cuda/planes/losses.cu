// Linear cross entropy and logsumexp_matmul of float32 operands: the fold, and dlogits.
#include "../../plan/tiles.h"
#include "../cross_entropy_passes.cuh"
#include "../engine.h"
#include "../sm90/cross_entropy_saving.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/path_counter.h"

namespace monoidreduce::cuda::planes {

using namespace monoidreduce::sm90;

static_assert(kSizesOf<PlaneTile<>> == tiles::kPlanesLoss);

template <>
void run(const CrossEntropyForward& x, const Plan& plan, const Launch& launch) {
  if (!x.kept.present()) return cross_entropy_forward_pass<PlaneTile<>, true>(x, launch);
  cross_entropy_forward_saving<PlaneTile<>>(x, plan, launch);
  count_path("cross_entropy_backward", "cuda", "planes", false, name(x.x.dtype));
}
template <>
void run(const CrossEntropyLocalGradient& x, const Plan&, const Launch& launch) {
  cross_entropy_gradient_pass<PlaneTile<>>(x, launch);
}
template <>
void run(const LogSumExpForward& x, const Plan& plan, const Launch& launch) {
  if (!x.kept.present()) return logsumexp_forward_pass<PlaneTile<>>(x, launch);
  logsumexp_forward_saving<PlaneTile<>>(x, plan, launch);
  count_path("logsumexp_backward", "cuda", "planes", false, name(x.a.dtype));
}
template <>
void run(const LogSumExpLocalGradient& x, const Plan&, const Launch& launch) {
  logsumexp_gradient_pass<PlaneTile<>>(x, launch);
}

}  // namespace monoidreduce::cuda::planes
