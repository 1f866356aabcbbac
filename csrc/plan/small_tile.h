// The small tile of Hopper's contractions of 16-bit operands, for calls that have too few wide tiles (tiles.h) for all clusters.
#pragma once

#include <cstdint>

#include "monoidreduce/device/schedule/parts.h"
#include "monoidreduce/launch/contraction_schedule.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce::tiles {

inline constexpr ContractionSizes kSm90Small{2, 256, 128, 1, 0};

// Whether it is faster than a tile of `wide` columns and as many rows, for a product [rows, columns]. That follows from the columns
// that the busiest cluster computes. For as many columns the small tile takes up to 1.1 times as long, because rows are read more
// often (bench/results/compare/nvidia_h200_small_tiles.json).
inline bool small_is_faster(std::int64_t wide, std::int64_t rows, std::int64_t columns,
                            const DeviceFacts& gpu) {
  constexpr double kMoreReads = 1.1;
  const std::int64_t row_blocks = parts_of(rows, kSm90Small.row_block),
                     clusters = gpu.multiprocessors / kSm90Small.blocks;
  const auto busiest = [&](std::int64_t tile) {
    return parts_of(row_blocks * parts_of(columns, tile), clusters) * tile;
  };
  return busiest(kSm90Small.columns) * kMoreReads < busiest(wide);
}

}  // namespace monoidreduce::tiles
