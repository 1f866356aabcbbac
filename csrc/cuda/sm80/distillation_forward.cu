#include "../../plan/tiles.h"
#include "../distillation_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/contraction_sm80.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using Tile = monoidreduce::sm80::ContractionTile<2, 2, false, true>;
static_assert(kSizesOf<Tile> == tiles::kSm80Distillation);
static_assert(kStateFloats<NamedDistillation<Bits>> == kStateFloats<NamedDistillation<float>>);

}  // namespace

template <>
void run(const DistillationForward& x, const Plan&, const Launch& launch) {
  distillation_forward_pass<Tile>(x, [&](auto element, const auto& m, const auto& scores, const auto& rows) {
    fold_contraction<decltype(element), Tile>(m, scores, distillation_problem(x), rows, x.scratch.data,
                                              launch);
  });
}

}  // namespace monoidreduce::cuda::sm80
