#include "../../plan/tiles.h"
#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/fold_few_rows_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

// As many stages as fit in shared memory.
using Width64 = ForwardTile<64, 64, 128, 1, 6, true>;
using Width128 = ForwardTile<128, 128, 128, 1, 3, true>;
using Width256 = ForwardTile<256, 256, 64, 1, 3, true>;

static_assert(Width64::kColumns == tiles::kFewRowsColumns[0] &&
              Width128::kColumns == tiles::kFewRowsColumns[1] &&
              Width256::kColumns == tiles::kFewRowsColumns[2]);

template <class Run>
void with_tile(const FoldProblem& p, Run run) {
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (width <= 64) return run(Width64{});
  if (width <= 128) return run(Width128{});
  run(Width256{});
}

}  // namespace

void mlp_few_rows(const MlpForward& x, const Packing& packing, const Launch& launch) {
  mlp_forward_pass(x, [&](auto element, const auto& m, const auto& scores, const auto& problem,
                          const auto& rows, const FoldOutput& out) {
    with_tile(problem, [&](auto tile) {
      fold_few_rows<decltype(element), decltype(tile)>(m, scores, problem, packing, rows, out,
                                                       data<float>(x.scratch), launch);
    });
  });
}

}  // namespace monoidreduce::cuda::sm90
