// Wide MLPs in float32, in parts: hidden values, and the derivatives with respect to their pre-activations.
#include "../../plan/tiles.h"
#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/launch/payload_epilogue.cuh"

namespace monoidreduce::cuda::planes {
namespace {

using namespace monoidreduce::sm90;

// Stores `outs`, as payload_weights does. Activations have the accuracy of float32.
template <int kScores, class Call>
void store_weights(const Call& x, const FoldProblem& p, const TensorView (&outs)[kScores],
                   const TensorView& sums, const Launch& launch) {
  using Tile = PlaneTile<kScores>;
  static_assert(Tile::kRowBlock == tiles::kHiddenPlanes.rows &&
                Tile::kColumns == tiles::kHiddenPlanes.columns);
  const BiasedScores<Full, float> scores{data<const float>(x.bias1), x.bias1.stride[0],
                                         static_cast<int>(x.w1.size[0])};
  payload_weights<float, Tile>(NamedSum<Full>{{}, x.activation}, scores, p, outs, sums, launch);
}

}  // namespace

template <>
void run(const MlpHidden& x, const Plan&, const Launch& launch) {
  store_weights(x, mlp_hidden_problem(x), {as_rows(x.out)}, {}, launch);
}
template <>
void run(const MlpLocalGradient& x, const Plan&, const Launch& launch) {
  store_weights(x, mlp_gradient_problem(x), {as_rows(x.hidden), as_rows(x.out)}, x.sums, launch);
}

}  // namespace monoidreduce::cuda::planes
