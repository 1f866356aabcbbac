#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/contraction_sm80.cuh"
#include "monoidreduce/launch/payload_epilogue.cuh"

namespace monoidreduce::cuda::sm80 {

template <>
void run(const MlpHidden& x, const Plan&, const Launch& launch) {
  with_mlp_monoid(x, [&](auto element, const auto& m, const auto& scores) {
    using Tile = monoidreduce::sm80::ContractionTile<2>;
    payload_weights<decltype(element), Tile>(m, scores, mlp_hidden_problem(x), {as_rows(x.out)}, {}, launch);
  });
}

}  // namespace monoidreduce::cuda::sm80
