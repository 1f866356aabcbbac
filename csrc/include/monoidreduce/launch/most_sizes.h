// The memory with which a program finds the k largest values of rows (device/contraction/most.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/contraction/most_memory.h"
#include "monoidreduce/error.h"
#include "monoidreduce/launch/contraction_schedule.h"

namespace monoidreduce {

// The memory for the k largest values of rows: in floats, what is initially 0 (MostMemory's best, then its locks), and all.
// Lists are looked at every kMostColumns columns, or after a share of a tile if that is fewer; so many elements (reach) may come in
// between. Four lanes share a row, and each has a quarter of its columns, of the slack and of the room for fresh elements.
struct MostSizes {
  std::int64_t zeros, floats;
  int pitch, slack;
};
inline MostSizes most_sizes(const ContractionSizes& tile, std::int64_t rows, const TileSchedule& schedule) {
  const int reach = std::min(tile.columns / tile.shares, kMostColumns), slack = reach / 2,
            pitch = kMostKept + slack + reach;
  require(reach % 8 == 0 && slack % 4 == 0, "columns: expected a multiple of 8 between two looks, got ",
          reach);
  constexpr std::int64_t kFloats = sizeof(RankedElement) / sizeof(float);
  const std::int64_t locks = parts_of(parts_of(rows, tile.row_block) * tile.row_block, kRowsOfLock),
                     zeros = rows * kMostKept * kFloats + parts_of(locks, kFloats) * kFloats,
                     lists = std::int64_t{schedule.clusters} * tile.shares * tile.row_block * pitch;
  return {zeros, zeros + lists * kFloats, pitch, slack};
}
inline MostMemory most_memory(const ContractionSizes& tile, std::int64_t rows, const TileSchedule& schedule,
                              float* scratch) {
  const MostSizes sizes = most_sizes(tile, rows, schedule);
  auto* const best = reinterpret_cast<RankedElement*>(scratch);
  return {.best = best,
          .lists = reinterpret_cast<RankedElement*>(scratch + sizes.zeros),
          .locks = reinterpret_cast<unsigned*>(best + rows * kMostKept),
          .rows = rows,
          .blocks = tile.blocks,
          .shares = tile.shares,
          .row_block = tile.row_block,
          .pitch = sizes.pitch,
          .slack = sizes.slack};
}

}  // namespace monoidreduce
