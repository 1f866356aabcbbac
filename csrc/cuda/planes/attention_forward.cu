#include "../../plan/tiles.h"
#include "../attention_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/fold_forward_planes_sm90.cuh"
#include "monoidreduce/ops/planes.h"

namespace monoidreduce::cuda::planes {
namespace {

using namespace monoidreduce::sm90;

using Tile = PlanesTile<tiles::kWidestPlanes, 3, 4>;
static_assert(tiles::kAttentionPlanes.rows == Tile::kRows &&
              tiles::kAttentionPlanes.columns == Tile::kColumns);
static_assert(planes_width(Tile::kWidth) * sizeof(__half) == PlanesMemory<Tile>::Operand::kLineOfBoth);

}  // namespace

template <>
void run(const AttentionForward& x, const Plan&, const Launch& launch) {
  const FoldProblem problem = attention_problem(x);
  float* const scratch = data<float>(x.scratch);
  auto* const counter = problem.range.all() ? nullptr : reinterpret_cast<unsigned long long*>(scratch);
  const FullAttentionRows rows{data<float>(x.lse), data<float>(x.lse_low), data<const float>(x.sinks)};
  fold_forward_planes<Tile>(LogSumExp<Full>{}, ScaledScores<Full>(problem.score, 1), problem, rows,
                            {x.out, x.out_low}, scratch + tiles::kCounterFloats, counter, launch);
  recompute_marked(x, problem, launch);
}

}  // namespace monoidreduce::cuda::planes
