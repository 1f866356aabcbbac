#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/contraction_sm80.cuh"
#include "monoidreduce/launch/payload_epilogue.cuh"

namespace monoidreduce::cuda::sm80 {

template <>
void run(const MlpLocalGradient& x, const Plan&, const Launch& launch) {
  with_mlp_monoid(x, [&](auto element, const auto& m, const auto& scores) {
    using Tile = monoidreduce::sm80::ContractionTile<3, 2, true>;
    payload_weights<decltype(element), Tile>(m, scores, mlp_gradient_problem(x),
                                             {as_rows(x.hidden), as_rows(x.out)}, x.sums, launch);
  });
}

}  // namespace monoidreduce::cuda::sm80
