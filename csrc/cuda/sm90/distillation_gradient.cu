#include "../../plan/tiles.h"
#include "../distillation_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/contraction_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

// One stage less than the forward pass, to make room for the staging slabs of the stores.
using Tile = monoidreduce::sm90::ContractionTile<192, 4, 2>;
static_assert(Tile::kRowBlock == tiles::kSm90Distillation.row_block &&
              Tile::kColumns == tiles::kSm90Distillation.columns);

}  // namespace

template <>
void run(const DistillationLocalGradient& x, const Plan&, const Launch& launch) {
  distillation_gradient_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm90
