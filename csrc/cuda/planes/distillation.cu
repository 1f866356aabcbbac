// Linear distillation of float32 operands: the fold, and dlogits.
#include "../../plan/tiles.h"
#include "../distillation_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/contraction_sm90.cuh"

namespace monoidreduce::cuda::planes {
namespace {

using Tile = monoidreduce::sm90::PlaneTile<2>;
static_assert(kSizesOf<Tile> == tiles::kPlanesLoss);

}  // namespace

template <>
void run(const DistillationForward& x, const Plan&, const Launch& launch) {
  const FoldProblem problem = distillation_problem(x);
  distillation_forward_pass<Tile>(x, [&](auto element, const auto& m, const auto& scores, const auto& rows) {
    fold_contraction<decltype(element), Tile>(m, scores, problem, rows, x.scratch.data, launch);
  });
}
template <>
void run(const DistillationLocalGradient& x, const Plan&, const Launch& launch) {
  distillation_gradient_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::planes
