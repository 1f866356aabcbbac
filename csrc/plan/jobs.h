// The jobs (work tiles) of the kernels on Hopper: which tiles they have, and in which order blocks take them. Kernels find their
// jobs on the device (device/schedule/). The cost model (monoidreduce/theory/costs) asks these functions, which also take tiles
// of sizes that no kernel has. tests/cpp/test_jobs.cpp compares both.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "monoidreduce/launch/launch.h"

namespace monoidreduce {

// A fold in which row i keeps the columns [i + shift - left, i + shift + right], where shift = columns - rows aligns the last row
// with the last column. left, right: -1 if unbounded.
struct BandedFold {
  std::int64_t rows, columns, left = -1, right = -1;
};

struct TileRange {
  std::int64_t begin, end;
};

// For each tile of `staying` lines that stay on chip, the tiles of `streamed` lines that stream past it. Lines that stay are rows
// if rows_stay, otherwise columns. If the band excludes every element of a tile, its range is {0, 0}.
std::vector<TileRange> streamed_tiles(const BandedFold& fold, bool rows_stay, std::int64_t staying,
                                      std::int64_t streamed);

// The jobs as (tile, head), in the order in which blocks take them: the longest first. tiles: of each head. section: the number
// of heads that take turns, job by job.
std::vector<std::pair<std::int64_t, std::int64_t>> job_order(const BandedFold& fold, bool rows_stay,
                                                             std::int64_t tiles, std::int64_t heads,
                                                             std::int64_t section);

// The number of tiles in each split of a job with so many (split-KV).
std::vector<std::int64_t> split_tiles(std::int64_t tiles, std::int64_t splits);

// The number of row blocks in each group into which a contraction divides the rows of a 16-bit product. Each group reads all
// columns again.
std::vector<std::int64_t> row_groups(std::int64_t rows, std::int64_t columns, std::int64_t width,
                                     const DeviceFacts& gpu);

}  // namespace monoidreduce
