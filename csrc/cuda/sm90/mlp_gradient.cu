#include "../../plan/small_tile.h"
#include "../../plan/tiles.h"
#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/launch/payload_epilogue.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using Wide = monoidreduce::sm90::ContractionTile<192, 4, 2>;
using Small = monoidreduce::sm90::ContractionTile<128, 6, 2>;

static_assert(Wide::kRowBlock == tiles::kHiddenGradient.rows &&
              Wide::kColumns == tiles::kHiddenGradient.columns);
static_assert(kSizesOf<Small> == tiles::kSm90Small);

}  // namespace

template <>
void run(const MlpLocalGradient& x, const Plan& plan, const Launch& launch) {
  require(plan.tile.has_value(), "plan: expected one with a tile, got ", text(plan));
  with_mlp_monoid(x, [&](auto element, const auto& m, const auto& scores) {
    const auto run_tile = [&](auto tile) {
      payload_weights<decltype(element), decltype(tile)>(m, scores, mlp_gradient_problem(x),
                                                         {as_rows(x.hidden), as_rows(x.out)}, x.sums, launch);
    };
    if (plan.tile->columns == Small::kColumns) return run_tile(Small{});
    run_tile(Wide{});
  });
}

}  // namespace monoidreduce::cuda::sm90
