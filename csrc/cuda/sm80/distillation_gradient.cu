#include "../distillation_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/contraction_sm80.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using Tile = monoidreduce::sm80::ContractionTile<3, 2>;

}  // namespace

template <>
void run(const DistillationLocalGradient& x, const Plan&, const Launch& launch) {
  distillation_gradient_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm80
