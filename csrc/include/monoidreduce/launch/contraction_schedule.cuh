// The schedule of a contraction's tiles (tile_schedule.cuh) on a GPU.
#pragma once

#include "monoidreduce/device/schedule/tile_schedule.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch_kernel.cuh"

namespace monoidreduce {

// On as many clusters as the device has, or there are tiles. Tile: kBlocks of a cluster, its tiles kRowBlock x kColumns. A
// part of the rows has the schedule of all, but for the number of row blocks: scratch for all serves it.
template <class Tile>
TileSchedule contraction_schedule(const FoldProblem& p) {
  const auto divide_up = [](std::int64_t a, int b) { return static_cast<int>((a + b - 1) / b); };
  const int device = p.a.cuda_device, row_blocks = divide_up(p.all_rows(), Tile::kRowBlock),
            column_tiles = divide_up(p.columns(), Tile::kColumns);
  const int clusters = static_cast<int>(std::min<std::int64_t>(multiprocessors(device) / Tile::kBlocks,
                                                               std::int64_t{row_blocks} * column_tiles));
  // Half of the L2 cache, but at most half of a Hopper GPU's: columns pass through the rest.
  const std::int64_t cache_bytes = std::min(24 << 20, attribute(cudaDevAttrL2CacheSize, device) / 2);
  const std::int64_t block_bytes = (p.width() + p.other_width()) * item_size(p.a.dtype) * Tile::kRowBlock;
  return {clusters, divide_up(p.rows(), Tile::kRowBlock), column_tiles,
          static_cast<int>(std::clamp<std::int64_t>(cache_bytes / block_bytes, 1, clusters))};
}

}  // namespace monoidreduce
