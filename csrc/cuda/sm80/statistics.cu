#include "../program_passes.cuh"
#include "monoidreduce/device/contraction/program_sm80.cuh"
#include "monoidreduce/launch/contraction_sm80.cuh"

namespace monoidreduce::cuda::sm80 {

using namespace monoidreduce::sm80;

static_assert(kSizesOf<ProgramFoldTile<1>> == tiles::kSm80Loss);
static_assert(kSizesOf<ProgramFoldTile<2>> == tiles::kSm80Distillation);

void statistics_fold(const StatisticsFold& x, const Plan&, const Launch& launch) {
  fold<ProgramFoldTile>(x, launch);
}
void statistics_local_gradient(const StatisticsLocalGradient& x, const Plan&, const Launch& launch) {
  local_gradient<ProgramGradientTile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm80
