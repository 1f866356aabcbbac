#include "../program_passes.cuh"
#include "monoidreduce/device/contraction/program_sm80.cuh"
#include "monoidreduce/launch/contraction_sm80.cuh"

namespace monoidreduce::cuda::sm80 {

using namespace monoidreduce::sm80;

template <int kScores>
using Tile = ProgramFoldTile<kScores, 256>;
static_assert(kSizesOf<Tile<1>> == tiles::kSm80Loss);
static_assert(kSizesOf<Tile<2>> == tiles::kSm80Distillation);

template <>
void run(const StatisticsFold& x, const Plan&, const Launch& launch) {
  fold<Tile>(x, launch);
}
template <>
void run(const StatisticsLocalGradient& x, const Plan&, const Launch& launch) {
  local_gradient<ProgramGradientTile>(x, launch);
}

}  // namespace monoidreduce::cuda::sm80
