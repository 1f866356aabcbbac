#include "../distillation_passes.cuh"
#include "../linear_losses.h"
#include "monoidreduce/launch/contraction_sm80.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using Tile = monoidreduce::sm80::ContractionTile<2, 2, false, true>;

}  // namespace

std::int64_t distillation_forward_scratch(const DistillationForward& x) {
  return fold_floats<NamedDistillation<Bits>, Tile>(distillation_problem(x));
}

void distillation_forward(const DistillationForward& x, const Launch& launch) {
  distillation_forward_pass(x, [&](auto element, const auto& m, const auto& scores, const auto& results) {
    fold_contraction<decltype(element), Tile>(m, scores, distillation_problem(x), results, x.scratch.data,
                                              launch);
  });
}

}  // namespace monoidreduce::cuda::sm80
