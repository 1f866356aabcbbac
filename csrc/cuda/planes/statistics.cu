// Users' programs on float32 operands: the fold, and the local gradients.
#include "../program_passes.cuh"
#include "monoidreduce/device/contraction/program_planes.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"

namespace monoidreduce::cuda::planes {

using namespace monoidreduce::sm90;

namespace {

template <int kScores>
using FoldTile = monoidreduce::planes::ProgramFoldTile<kScores, 256>;

}  // namespace

static_assert(kSizesOf<FoldTile<1>> == tiles::kPlanesLoss);
static_assert(kSizesOf<FoldTile<2>> == tiles::kPlanesLoss);

template <>
void run(const StatisticsFold& x, const Plan&, const Launch& launch) {
  fold<FoldTile>(x, launch);
}
template <>
void run(const StatisticsLocalGradient& x, const Plan&, const Launch& launch) {
  local_gradient<monoidreduce::planes::ProgramGradientTile>(x, launch);
}

}  // namespace monoidreduce::cuda::planes
