#include <algorithm>

#include "../../plan/tiles.h"
#include "../attention_passes.cuh"
#include "../engine.h"
#include "attention_scores.cuh"
#include "forward_tiles.h"
#include "monoidreduce/launch/fold_forward_planes_sm90.cuh"
#include "monoidreduce/ops/planes.h"

namespace monoidreduce::cuda::planes {

using namespace monoidreduce::sm90;

template <>
void run(const AttentionForward& x, const Plan&, const Launch& launch) {
  const FoldProblem problem = attention_problem(x);
  float* const scratch = data<float>(x.scratch);
  auto* const counter = problem.range.all() ? nullptr : reinterpret_cast<unsigned long long*>(scratch);
  const FullAttentionRows rows{data<float>(x.lse), data<float>(x.lse_low), data<const float>(x.sinks)};
  const auto fold = [&]<class Tile>(Tile) {
    static_assert(planes_of_head(Tile::kBlocks * Tile::kWidth) * sizeof(__half) ==
                  Tile::kBlocks * PlanesMemory<Tile>::Operand::kLineOfBoth);
    with_scores(problem, {}, [&](const auto& scores) {
      fold_forward_planes<Tile>(LogSumExp<Full>{}, scores, problem, rows, {x.out, x.out_low},
                                scratch + tiles::kCounterFloats, counter, launch);
    });
  };
  const std::int64_t width = std::max(problem.width(), problem.payload_width());
  if (width <= 64)
    fold(Width64{});
  else if (width <= 128)
    fold(Width128{});
  else
    fold(Width256{});
  recompute_marked(x, problem, launch);
}

}  // namespace monoidreduce::cuda::planes
