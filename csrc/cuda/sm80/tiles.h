// The tiles of the resident kernels, chosen by width; in the backward pass also by the shared memory that a
// block may have. It may have 163 KiB on sm_80, more on sm_90 and sm_100, and 99 KiB on sm_86, sm_89 and
// sm_120.
#pragma once

#include <algorithm>

#include "../../plan/tiles.h"
#include "monoidreduce/launch/fold_backward_sm80.cuh"
#include "monoidreduce/launch/fold_forward_sm80.cuh"

namespace monoidreduce::cuda::sm80 {

// Forward tiles for floats, which take twice the shared memory: up to 96 KiB, or 128 for a transposed payload
// 256 wide, whose lines are 32 columns. TFLOP/s on an H100, 4k tokens, full. Width 64: 135, with 32 columns
// 125. Width 128: 151, with 64 columns 114, with one fragment 118. Width 256: 87, with 32 columns 72.
template <bool kTransposed>
struct FloatForwardTiles {
  template <int kWidth, int kColumns, int kFragments, int kStages, int kBlocks>
  using Tile = monoidreduce::sm80::ForwardTile<kWidth, kColumns, kFragments, kStages, kBlocks, kTransposed>;
  using Width64 = Tile<64, 64, 2, 3, 2>;
  using Width128 = Tile<128, 32, 2, 2, 2>;
  using Width256 = std::conditional_t<kTransposed, Tile<256, 32, 1, 2, 1>, Tile<256, 16, 1, 2, 2>>;
};

// The forward tiles of the MLP.
template <class E>
struct MlpForwardTiles {
  using Width64 = monoidreduce::sm80::ForwardTile<64, 64, 2, 2, 3, true>;
  using Width128 = monoidreduce::sm80::ForwardTile<128, 64, 2, 2, 2, true>;
  using Width256 = monoidreduce::sm80::ForwardTile<256, 64, 1, 2, 2, true>;
};
template <>
struct MlpForwardTiles<float> : FloatForwardTiles<true> {};

// Calls run(Tile{}) with the tile for a width.
template <class Tiles, class Run>
void with_forward_tile(std::int64_t width, Run run) {
  if (width <= 64) return run(typename Tiles::Width64{});
  if (width <= 128) return run(typename Tiles::Width128{});
  run(typename Tiles::Width256{});
}

static_assert(sizeof(monoidreduce::sm80::ForwardMemory<float, FloatForwardTiles<true>::Width256>) ==
              tiles::kForwardFloatsBytes);
template <template <class> class Tiles, class E>
constexpr bool planned(const tiles::ForwardSizes (&sizes)[3]) {
  const auto is = [](auto tile, const tiles::ForwardSizes& size) {
    return tiles::ForwardSizes{tile.kRows, tile.kColumns, tile.kBlocks} == size;
  };
  using T = Tiles<E>;
  return is(typename T::Width64{}, sizes[0]) && is(typename T::Width128{}, sizes[1]) &&
         is(typename T::Width256{}, sizes[2]);
}
static_assert(planned<MlpForwardTiles, __half>(tiles::kMlpForward) &&
              planned<MlpForwardTiles, float>(tiles::kMlpForwardFloats));

template <class E, class Tile>
inline constexpr std::int64_t kBackwardBytes = sizeof(monoidreduce::sm80::BackwardMemory<E, Tile>);

template <class E, bool kTransposed, bool kBiased = false>
struct BackwardTiles {
  template <int kWidth, int kRows, int kColumns, int kWarps, int kStages, int kBlocks>
  using Tile =
      monoidreduce::sm80::BackwardTile<kWidth, kRows, kColumns, kWarps, kStages, kBlocks, kTransposed>;
  // TFLOP/s on an H100, full. Width 64, 8k tokens: 274, the small tile 243. Width 128, 16k: 310 and 273.
  // Width 256, 8k: 221, and 201 with two stages of 32 rows. With more columns there are fewer additions to
  // the rows' gradients.
  using Width64 = Tile<64, kBiased ? 64 : 128, 128, 8, 2, 1>;  // a score bias takes registers
  using SmallWidth64 = Tile<64, 64, 64, 4, 1, kBiased ? 2 : 3>;
  using Width128 = Tile<128, 64, 128, 8, 2, 1>;
  using SmallWidth128 = Tile<128, 64, 64, 4, 1, 2>;
  using Width256 = Tile<256, 64, 64, 8, 1, 1>;
};
template <bool kTransposed, bool kBiased>
struct BackwardTiles<float, kTransposed, kBiased> {
  template <int kWidth, int kRows, int kColumns, int kWarps, int kStages, int kBlocks>
  using Tile =
      monoidreduce::sm80::BackwardTile<kWidth, kRows, kColumns, kWarps, kStages, kBlocks, kTransposed>;
  // TFLOP/s for floats, as above: width 64, 124, with 32 rows 109, with two stages 90; width 128, 105, with
  // 64 rows 88, the small tile 78; width 256, 59.
  using Width64 = Tile<64, 64, 64, 4, 1, 2>;
  using SmallWidth64 = Width64;
  using Width128 = Tile<128, 32, 64, 4, 1, 2>;
  using SmallWidth128 = Tile<128, 32, 32, 4, 1, 2>;
  using Width256 = Tile<256, 32, 32, 4, 1, 1>;
};

static_assert(kBackwardBytes<__half, BackwardTiles<__half, false>::Width256> == tiles::kBackwardBytes);
static_assert(kBackwardBytes<float, BackwardTiles<float, false>::Width256> == tiles::kBackwardFloatsBytes);

// Calls run(Tile{}) with the tile for a problem.
template <class E, bool kTransposed, bool kBiased, class Run>
void with_backward_tile(const FoldProblem& p, Run run) {
  using Tiles = BackwardTiles<E, kTransposed, kBiased>;
  const std::int64_t width = std::max(p.width(), p.payload_width()),
                     bytes = device_facts(p.a.cuda_device).shared_bytes;
  if (width <= 64 && bytes >= kBackwardBytes<E, typename Tiles::Width64>)
    return run(typename Tiles::Width64{});
  if (width <= 64) return run(typename Tiles::SmallWidth64{});
  if (width <= 128 && bytes >= kBackwardBytes<E, typename Tiles::Width128>)
    return run(typename Tiles::Width128{});
  if (width <= 128) return run(typename Tiles::SmallWidth128{});
  run(typename Tiles::Width256{});
}

}  // namespace monoidreduce::cuda::sm80
