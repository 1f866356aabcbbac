#include "../../plan/tiles.h"
#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/fold_forward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

// TFLOP/s on an H200, 16384 x 16384, width 128: 638 with 128 columns, 593 with 176.
using Width64 = ForwardTile<64, 64, 128, 2, 3, true>;
using Width128 = ForwardTile<128, 128, 128, 2, 2, true>;
using Width256 = ForwardTile<256, 256, 64, 2, 2, true>;

template <class Tile>
constexpr bool planned = tiles::mlp_forward(Tile::kWidth).rows == Tile::kRows &&
                         tiles::mlp_forward(Tile::kWidth).columns == Tile::kColumns;
static_assert(planned<Width64> && planned<Width128> && planned<Width256>);

}  // namespace

template <>
void run(const MlpForward& x, const Plan& plan, const Launch& launch) {
  if (plan.packing) return mlp_few_rows(x, *plan.packing, launch);
  const std::int64_t width = std::max(x.x.size[1], x.w2.size[0]);
  mlp_forward_pass(x, [&](auto element, const auto& m, const auto& scores, const auto& problem,
                          const auto& rows, const FoldOutput& out) {
    using E = decltype(element);
    if (width <= 64) return fold_forward<E, Width64>(m, scores, problem, rows, out, launch);
    if (width <= 128) return fold_forward<E, Width128>(m, scores, problem, rows, out, launch);
    fold_forward<E, Width256>(m, scores, problem, rows, out, launch);
  });
}

}  // namespace monoidreduce::cuda::sm90
