// The tile schedule of a contraction on a given GPU (tile_schedule.cuh), and the scratch that a fold over its tiles needs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/schedule/parts.h"
#include "monoidreduce/device/schedule/tile_schedule.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce {

// The properties of a contraction tile that schedule and scratch depend on:
//   blocks       CTAs of a cluster
//   row_block    rows that a cluster computes at a time
//   columns      columns that a cluster computes at a time
//   shares       warpgroups that have the same rows, and share their columns
//   scratch      floats of scratch of a cluster
struct ContractionSizes {
  int blocks, row_block, columns, shares, scratch;
  bool operator==(const ContractionSizes&) const = default;
};
template <class Tile>
inline constexpr ContractionSizes kSizesOf{Tile::kBlocks, Tile::kRowBlock, Tile::kColumns, Tile::kShares,
                                           Tile::kScratch};

// The schedule on as many clusters as the GPU runs, or as there are tiles. A problem with a part of the rows has the same
// schedule as all rows but for the number of row blocks, so scratch for all rows suffices for it.
inline TileSchedule contraction_schedule(const ContractionSizes& tile, const FoldProblem& p,
                                         const DeviceFacts& gpu) {
  const std::int64_t row_blocks = parts_of(p.all_rows(), tile.row_block),
                     column_tiles = parts_of(p.columns(), tile.columns),
                     clusters =
                         std::min<std::int64_t>(gpu.multiprocessors / tile.blocks, row_blocks * column_tiles);
  // Rows may take half of the L2 cache, and at most half of a Hopper GPU's (24 MiB). Columns pass through the rest.
  const std::int64_t cache_bytes = std::min<std::int64_t>(24 << 20, gpu.cache_bytes / 2);
  const std::int64_t block_bytes = (p.width() + p.other_width()) * item_size(p.a.dtype) * tile.row_block;
  return {static_cast<int>(clusters), static_cast<int>(parts_of(p.rows(), tile.row_block)),
          static_cast<int>(column_tiles),
          static_cast<int>(std::clamp<std::int64_t>(cache_bytes / block_bytes, 1, clusters))};
}

// The size of all partial states, in floats; state_floats is the size of one.
inline std::int64_t partial_floats(const ContractionSizes& tile, std::int64_t state_floats,
                                   const TileSchedule& schedule) {
  return std::int64_t{schedule.most_groups()} * schedule.clusters * tile.shares * tile.row_block *
         state_floats;
}

// The scratch of a problem's fold, in floats: partial states, and the tiles' own scratch.
inline std::int64_t fold_floats(const ContractionSizes& tile, std::int64_t state_floats, const FoldProblem& p,
                                const DeviceFacts& gpu) {
  const TileSchedule schedule = contraction_schedule(tile, p, gpu);
  return partial_floats(tile, state_floats, schedule) + std::int64_t{schedule.clusters} * tile.scratch;
}

}  // namespace monoidreduce
