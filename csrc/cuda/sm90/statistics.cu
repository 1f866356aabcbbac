#include "../program_passes.cuh"
#include "monoidreduce/device/contraction/program_sm90.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"

namespace monoidreduce::cuda::sm90 {

using namespace monoidreduce::sm90;

static_assert(kSizesOf<ProgramFoldTile<1>> == tiles::kSm90Loss);
static_assert(kSizesOf<ProgramFoldTile<2>> == tiles::kSm90Distillation);

template <>
void run(const StatisticsFold& x, const Plan&, const Launch& launch) {
  fold<ProgramFoldTile>(x, launch);
}
template <>
void run(const StatisticsLocalGradient& x, const Plan&, const Launch& launch) {
  local_gradient<ProgramGradientTile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm90
