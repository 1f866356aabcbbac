#include "../../plan/tiles.h"
#include "../attention_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/fold_forward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

// TFLOP/s. Width 64, H200, 16k tokens, full, 128 columns: 430 with 2 consumers, 482 with 3. Width 128, H100:
// with 128 columns there is room for a second buffer of rows. With 128 and with 192 columns, full and then
// causal. 2k: 643 / 627 and 533 / 502. 4k: 640 / 639 and 615 / 604. 8k: 638 / 663 and 634 / 644.
using tiles::kFewColumns;

// B: the element type of score biases that come in tiles, or void.
template <class Scores, class B = BiasElement<Scores>>
struct Tiles {
  // Biases take shared memory and registers. Their lines have 32 columns of float, or 64.
  using Width64 = ForwardTile<64, 64, 128, 2, 2>;
  using Width128 = ForwardTile<128, 128, sizeof(B) == 4 ? 96 : 128, 2, 2>;
  using FewColumnsWidth128 = Width128;
  using Width256 = ForwardTile<256, 256, 64, 2, 2>;
};
template <class Scores>
struct Tiles<Scores, void> {
  // A softcap takes registers too. H100, 8k tokens: 1.26 ms with 2 consumers, 1.36 with 3, which spill.
  static constexpr bool kSoftcapped = std::is_same_v<Scores, SoftcappedScores<Bits>>;
  using Width64 = ForwardTile<64, 64, 128, kSoftcapped ? 2 : 3, 2>;
  using Width128 = ForwardTile<128, 128, kSoftcapped ? 128 : 192, 2, 2>;
  using FewColumnsWidth128 = ForwardTile<128, 128, 128, 2, 2>;
  using Width256 = ForwardTile<256, 256, 80, 2, 2>;
};

template <class Scores>
constexpr bool planned(bool softcapped, std::int64_t bias_bytes) {
  const auto is = [&](auto tile, std::int64_t width, std::int64_t columns) {
    const TileSize size = tiles::attention_forward(width, columns, softcapped, bias_bytes);
    return size.rows == tile.kRows && size.columns == tile.kColumns;
  };
  using T = Tiles<Scores>;
  return is(typename T::Width64{}, 64, 1) && is(typename T::FewColumnsWidth128{}, 128, kFewColumns) &&
         is(typename T::Width128{}, 128, kFewColumns + 1) && is(typename T::Width256{}, 256, 1);
}
static_assert(planned<ScaledScores<Bits>>(false, 0) && planned<SoftcappedScores<Bits>>(true, 0) &&
              planned<TileBiasedScores<Bits, float>>(false, 4) &&
              planned<TileBiasedScores<Bits, __half>>(false, 2) &&
              planned<TileBiasedScores<Bits, bool>>(false, 1));

}  // namespace

template <>
void run(const AttentionForward& x, const Plan& plan, const Launch& launch) {
  if (plan.packing) return attention_few_rows(x, *plan.packing, launch);
  auto* const counter = plan.scratch > 0 ? data<unsigned long long>(x.scratch) : nullptr;
  const std::int64_t width = std::max(x.q.size[3], x.v.size[3]);
  const FoldProblem problem = attention_problem(x);
  const DeviceGuard device(x.q.cuda_device);
  const auto fold_rows = [&]<class E, class Scores, class Rows>(E, const Scores& scores, const Rows& rows) {
    using B = BiasElement<Scores>;
    using Tile = Tiles<Scores>;
    const auto fold = [&]<class T>(T) {
      launch_kernel("fold_forward_sm90", &fold_forward_kernel<E, T, LogSumExp<Bits>, Scores, Rows>,
                    forward_blocks<T>(problem), T::kThreads, kForwardBytes<T, B>, launch.stream,
                    forward_arguments<E, T, B>(problem, {x.out, x.out_low}, counter, launch),
                    LogSumExp<Bits>{}, scores, rows);
    };
    if (width <= 64) return fold(typename Tile::Width64{});
    using Few = typename Tile::FewColumnsWidth128;
    if (width <= 128 && plan.tile->columns == Few::kColumns) return fold(Few{});
    if (width <= 128) return fold(typename Tile::Width128{});
    fold(typename Tile::Width256{});
  };
  with_attention_rows<Biases::kTiles>(x, problem, fold_rows);
  repair_attention(x, problem, launch);
}

}  // namespace monoidreduce::cuda::sm90
