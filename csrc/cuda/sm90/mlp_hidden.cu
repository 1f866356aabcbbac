#include "../../plan/tiles.h"
#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/launch/payload_epilogue.cuh"

namespace monoidreduce::cuda::sm90 {

template <>
void run(const MlpHidden& x, const Plan&, const Launch& launch) {
  with_mlp_monoid(x, [&](auto element, const auto& m, const auto& scores) {
    using Tile = monoidreduce::sm90::ContractionTile<256, 4>;
    static_assert(Tile::kRowBlock == tiles::kHidden.rows && Tile::kColumns == tiles::kHidden.columns);
    payload_weights<decltype(element), Tile>(m, scores, mlp_hidden_problem(x), {as_rows(x.out)}, {}, launch);
  });
}

}  // namespace monoidreduce::cuda::sm90
