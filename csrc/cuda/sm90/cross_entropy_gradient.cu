#include "../../plan/tiles.h"
#include "../cross_entropy_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/contraction_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using Tile = monoidreduce::sm90::ContractionTile<256, 4>;
static_assert(Tile::kRowBlock == tiles::kSm90Loss.row_block && Tile::kColumns == tiles::kSm90Loss.columns);

}  // namespace

void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Plan&, const Launch& launch) {
  cross_entropy_gradient_pass<Tile>(x, launch);
}

void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Plan&, const Launch& launch) {
  logsumexp_gradient_pass<Tile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm90
