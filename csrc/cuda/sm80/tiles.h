// Tiles of the backward pass by width and by the shared memory that a block may have: 163 KiB on sm_80, more on sm_90 and
// sm_100, 99 KiB on sm_86, sm_89 and sm_120.
#pragma once

#include <algorithm>

#include "monoidreduce/kernel/fold_backward_sm80.cuh"

namespace monoidreduce::cuda::sm80 {

template <class Tile>
bool fits(const FoldProblem& p) {
  return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, p.a.cuda_device) >=
         static_cast<int>(sizeof(monoidreduce::sm80::BackwardMemory<Tile>));
}

template <bool kTransposed, bool kBiased = false>
struct BackwardTiles {
  template <int kWidth, int kRows, int kColumns, int kWarps, int kStages, int kBlocks>
  using Tile =
      monoidreduce::sm80::BackwardTile<kWidth, kRows, kColumns, kWarps, kStages, kBlocks, kTransposed>;
  // TFLOP/s on an H100, full: width 64, 8k tokens, 274, the small tile 243; width 128, 16k, 310 and 273; width 256, 8k, 221,
  // and 201 with two stages of 32 rows. More columns mean fewer additions to the rows' gradients.
  using Width64 = Tile<64, kBiased ? 64 : 128, 128, 8, 2, 1>;  // a bias of scores takes registers
  using SmallWidth64 = Tile<64, 64, 64, 4, 1, 3>;
  using Width128 = Tile<128, 64, 128, 8, 2, 1>;
  using SmallWidth128 = Tile<128, 64, 64, 4, 1, 2>;
  using Width256 = Tile<256, 64, 64, 8, 1, 1>;
};

// Calls run(Tile{}) with the tile for a problem.
template <bool kTransposed, bool kBiased, class Run>
void with_backward_tile(const FoldProblem& p, Run run) {
  using Tiles = BackwardTiles<kTransposed, kBiased>;
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (width <= 64 && fits<typename Tiles::Width64>(p)) return run(typename Tiles::Width64{});
  if (width <= 64) return run(typename Tiles::SmallWidth64{});
  if (width <= 128 && fits<typename Tiles::Width128>(p)) return run(typename Tiles::Width128{});
  if (width <= 128) return run(typename Tiles::SmallWidth128{});
  run(typename Tiles::Width256{});
}

}  // namespace monoidreduce::cuda::sm80
