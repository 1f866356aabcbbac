// Users' programs on float32 operands: the fold, and the local gradients.
#include "../program_passes.cuh"
#include "monoidreduce/device/contraction/program_planes.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"

namespace monoidreduce::cuda::planes {

using namespace monoidreduce::sm90;

template <>
void run(const StatisticsFold& x, const Plan&, const Launch& launch) {
  fold_by(PlaneTile<>{}, x, launch);
}
template <>
void run(const StatisticsLocalGradient& x, const Plan&, const Launch& launch) {
  local_gradient_by(PlaneTile<>{}, x, stores_for(PlaneTile<>{}, {as_rows(x.out)}), launch);
}

}  // namespace monoidreduce::cuda::planes
