// Chooses how few rows are packed (PackGQA) and how their columns are split (split-KV).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "monoidreduce/device/schedule/packing.h"
#include "monoidreduce/device/schedule/parts.h"
#include "monoidreduce/fold.h"

namespace monoidreduce {

// The number of tiles of rows.
inline std::int64_t packed_tiles(const FoldProblem& p, const Packing& packing) {
  const std::int64_t group = p.heads() / p.column_heads();
  return p.batch() * p.column_heads() * parts_of(group, packing.heads) * parts_of(p.rows(), packing.rows);
}

// The largest number of unmasked columns of a tile of rows.
inline std::int64_t unmasked_columns(const FoldProblem& p, const Packing& packing) {
  const ColumnRange& range = p.range;
  if (range.left == ColumnRange::kUnbounded || range.right == ColumnRange::kUnbounded) return p.columns();
  return std::min(range.left + range.right + packing.rows, p.columns());
}

// The number of splits of the columns of each tile of rows. of_tile: how many times as long a tile of columns takes as in
// attention, for which the constants below were measured. SMs take jobs in waves, and a wave lasts as long as a job's column
// tiles. So only numbers of splits that fill waves are candidates; among candidates with equally long jobs, the smallest is
// best.
//
// The cost model counts in column tiles. On an H100 a tile takes 1.1 us with few jobs (bound by the SM), or 2.7 us with 128
// jobs (bound by memory). A job costs kOfJob tiles more than its own; the kernel that combines splits costs kOfCombining.
//
// Measured times in us, by number of splits:
//     8 tiles of rows,   4096 columns    1: 42    4: 18    8: 15.6   16: 17
//     8 tiles of rows, 131072 columns    1: 1119  4: 286   8: 191    16: 185
//   128 tiles of rows,  16384 columns    1: 351   2: 360
//   136 tiles of rows,   4096 columns    1: 131   3: 114             (1 split: a wave of 132 jobs and one of 4)
inline constexpr std::int64_t kAnySplits = std::numeric_limits<std::int64_t>::max();
inline int splits_of(std::int64_t row_tiles, std::int64_t column_tiles, int multiprocessors,
                     std::int64_t most_splits = kAnySplits, std::int64_t of_tile = 1) {
  constexpr int kMostRounds = 4;
  constexpr std::int64_t kOfJob = 2, kOfCombining = 4;
  const auto cost = [&](std::int64_t splits) {
    return parts_of(row_tiles * splits, multiprocessors) *
               (parts_of(column_tiles, splits) * of_tile + kOfJob) +
           (splits > 1 ? kOfCombining : 0);
  };
  std::int64_t best = 1;
  for (int rounds = 1; rounds <= kMostRounds; ++rounds) {
    const std::int64_t most = std::min({rounds * multiprocessors / row_tiles, column_tiles, most_splits});
    if (most < 2) continue;
    const std::int64_t splits = parts_of(column_tiles, parts_of(column_tiles, most));
    if (cost(splits) < cost(best)) best = splits;
  }
  return static_cast<int>(best);
}

// The packing for few rows. Every tile has the same shape, with as many heads of a group as fit. column_tile: the number of
// columns of a tile.
inline Packing pack_rows(const FoldProblem& p, int column_tile, int multiprocessors,
                         std::int64_t most_splits = kAnySplits) {
  const auto in_even_parts = [](std::int64_t all, std::int64_t most) {
    return parts_of(all, parts_of(all, most));
  };
  const std::int64_t heads = in_even_parts(p.heads() / p.column_heads(), kPackedLines);
  Packing packing{static_cast<int>(heads), static_cast<int>(in_even_parts(p.rows(), kPackedLines / heads)),
                  1};
  packing.splits = splits_of(packed_tiles(p, packing), parts_of(unmasked_columns(p, packing), column_tile),
                             multiprocessors, most_splits);
  return packing;
}

// Whether so many tiles of rows leave at least half of the places idle. A place is where the GPU can run a tile at a time.
inline bool leave_half_idle(std::int64_t row_tiles, std::int64_t places) { return 2 * row_tiles <= places; }

// The packing if rows are few, otherwise nothing. Rows are few if they fit into one tile, or if tiles with twice as many lines
// would leave half of the SMs idle.
inline std::optional<Packing> pack_few_rows(const FoldProblem& p, int column_tile, int multiprocessors,
                                            std::int64_t most_splits = kAnySplits) {
  const std::int64_t tiles = p.batch() * p.heads() * parts_of(p.rows(), 2 * kPackedLines);
  if (p.rows() > kPackedLines && !leave_half_idle(tiles, multiprocessors)) return {};
  return pack_rows(p, column_tile, multiprocessors, most_splits);
}

// The size of the results of splits (device/resident/combine_splits.cuh), in floats: payload sums and states. state_floats is
// the size of a state.
inline std::int64_t partial_rows_floats(const FoldProblem& p, int splits, std::int64_t state_floats) {
  return splits * p.batch() * p.heads() * p.rows() * (p.payload_width() + state_floats);
}

}  // namespace monoidreduce
