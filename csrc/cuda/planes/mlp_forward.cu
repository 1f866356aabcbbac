#include <algorithm>

#include "../../plan/mlp.h"
#include "../engine.h"
#include "../mlp_passes.cuh"
#include "forward_tiles.h"
#include "monoidreduce/launch/fold_forward_planes_sm90.cuh"
#include "monoidreduce/launch/repair.cuh"

namespace monoidreduce::cuda::planes {
namespace {

using namespace monoidreduce::sm90;

// The rows of an MLP's output. A row that is not finite gets a mark, and repair_forward computes marked rows again.
struct MarkedMlpRows : MlpRows<float> {
  float* marks;  // [rows]
  template <class P>
  __device__ void store(std::int64_t row, int, P, bool right) const {
    marks[row] = right ? 0.f : 1.f;
  }
  __device__ bool marked(std::int64_t row) const { return marks[row] != 0.f; }
  __device__ void store(std::int64_t, float) const {}
};

}  // namespace

template <>
void run(const MlpForward& x, const Plan&, const Launch& launch) {
  const FoldProblem problem = mlp_problem(x, x.bias2);
  const MlpPlanesParts parts(x);
  float* const scratch = data<float>(x.scratch);
  const BiasedScores<Full, float> scores{data<const float>(x.bias1), x.bias1.stride[0],
                                         static_cast<int>(x.w1.size[0])};
  const MarkedMlpRows rows{{data<const float>(x.bias2), x.bias2.stride[0], static_cast<int>(x.w2.size[0])},
                           scratch};
  const FoldOutput out{as_rows(x.out)};
  const auto fold = [&]<class Tile>(Tile) {
    fold_forward_planes<Tile>(NamedSum<Full>{{}, x.activation}, scores, problem, rows, out,
                              scratch + parts.marks, nullptr, launch);
  };
  if (std::max(problem.width(), problem.payload_width()) <= 64)
    fold(Width64{});
  else
    fold(Width128{});
  repair_forward(NamedSum<float>{{}, x.activation}, problem, rows, out, launch);
}

}  // namespace monoidreduce::cuda::planes
