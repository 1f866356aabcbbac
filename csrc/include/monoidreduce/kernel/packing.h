// Few rows: how the rows of several heads share a tile, and the columns of a tile are split between jobs.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>

#include "monoidreduce/fold.h"
#include "monoidreduce/kernel/parts.h"

namespace monoidreduce {

// Lines of a tile: head * rows + row, at most kPackedLines of them.
struct Packing {
  int heads, rows;  // of a tile: heads that share a column head, rows of each
  int splits;       // jobs that share the columns of a tile
};
inline constexpr int kPackedLines = 64;

// Tiles of rows.
inline std::int64_t packed_tiles(const FoldProblem& p, const Packing& packing) {
  const std::int64_t group = p.heads() / p.column_heads();
  return p.batch() * p.column_heads() * parts_of(group, packing.heads) * parts_of(p.rows(), packing.rows);
}

// The most columns that rows of a tile keep.
inline std::int64_t kept_columns(const FoldProblem& p, const Packing& packing) {
  const ColumnRange& range = p.range;
  if (range.left == ColumnRange::kUnbounded || range.right == ColumnRange::kUnbounded) return p.columns();
  return std::min(range.left + range.right + packing.rows, p.columns());
}

// In how many splits: multiprocessors take jobs in rounds, and a round lasts as long as the tiles of columns that a job has.
// Only as many splits as fill rounds are worth a look, and of equally long jobs as few as there may be.
//
// In tiles of columns (1.1 us on an H100 with few jobs, bound by the multiprocessor; 2.7 us with 128, bound by memory) a job
// costs kOfJob beside its own, and the kernel that combines splits kOfCombining. With 8 tiles of rows, us by splits:
// 4096 columns 1: 42, 4: 18, 8: 15.6, 16: 17; 131072 columns 1: 1119, 4: 286, 8: 191, 16: 185. With 128 tiles of rows and
// 16384 columns 1: 351, 2: 360; with 136 and 4096 columns, a round of 132 jobs and one of 4, 1: 131, 3: 114.
inline constexpr std::int64_t kAnySplits = std::numeric_limits<std::int64_t>::max();
inline int splits_of(std::int64_t row_tiles, std::int64_t column_tiles, int multiprocessors,
                     std::int64_t most_splits = kAnySplits) {
  constexpr int kMostRounds = 4;
  constexpr std::int64_t kOfJob = 2, kOfCombining = 4;
  const auto cost = [&](std::int64_t splits) {
    return parts_of(row_tiles * splits, multiprocessors) * (parts_of(column_tiles, splits) + kOfJob) +
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

// All tiles of rows alike, as many heads of a group in each as fit. column_tile: how many columns a tile has.
inline Packing pack_rows(const FoldProblem& p, int column_tile, int multiprocessors,
                         std::int64_t most_splits = kAnySplits) {
  const auto in_even_parts = [](std::int64_t all, std::int64_t most) {
    return parts_of(all, parts_of(all, most));
  };
  const std::int64_t heads = in_even_parts(p.heads() / p.column_heads(), kPackedLines);
  Packing packing{static_cast<int>(heads), static_cast<int>(in_even_parts(p.rows(), kPackedLines / heads)),
                  1};
  packing.splits = splits_of(packed_tiles(p, packing), parts_of(kept_columns(p, packing), column_tile),
                             multiprocessors, most_splits);
  return packing;
}

// Do so many tiles of rows leave half of the places for them idle, or more.
inline bool leave_half_idle(std::int64_t row_tiles, std::int64_t places) { return 2 * row_tiles <= places; }

// The same where rows are few: no more than a tile has, or so few that tiles of twice as many lines would leave half of the
// multiprocessors idle. Else nothing.
inline std::optional<Packing> pack_few_rows(const FoldProblem& p, int column_tile, int multiprocessors,
                                            std::int64_t most_splits = kAnySplits) {
  const std::int64_t tiles = p.batch() * p.heads() * parts_of(p.rows(), 2 * kPackedLines);
  if (p.rows() > kPackedLines && !leave_half_idle(tiles, multiprocessors)) return {};
  return pack_rows(p, column_tile, multiprocessors, most_splits);
}

}  // namespace monoidreduce
