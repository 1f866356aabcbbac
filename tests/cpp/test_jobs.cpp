// Compares the jobs that csrc/plan tells the cost model with those that the kernels' schedulers find on the device.
#include <algorithm>
#include <utility>

// What the schedulers use of CUDA's language.
#define __device__
#define __forceinline__ inline
using std::max, std::min;
struct {
  int x = 0;
} blockIdx, gridDim;
template <class T>
T atomicAdd(T* counter, T by) {
  return std::exchange(*counter, *counter + by);
}

#include "../../csrc/plan/jobs.h"
#include "check.h"
#include "monoidreduce/device/schedule/packed_schedule.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"

namespace monoidreduce::test {
namespace {

constexpr int kHeads = 3, kGroup = 2, kRows = 4, kColumns = 3;  // column heads; query heads of each; a tile

FoldShape shape_of(const BandedFold& fold, int heads, int section) {
  const auto side = [](std::int64_t lines) { return lines < 0 ? ColumnRange::kUnbounded : lines; };
  ColumnRange range{};
  range.left = side(fold.left), range.right = side(fold.right), range.shift = fold.columns - fold.rows;
  return {.batch = 1,
          .heads = heads,
          .group = kGroup,
          .rows = static_cast<int>(fold.rows),
          .columns = static_cast<int>(fold.columns),
          .band = Band(range),
          .row_spans = nullptr,
          .column_spans = nullptr,
          .masked_by_bias = false,
          .batches_follow = false,
          .section = section};
}

void check_rows(const BandedFold& fold, int section, Checks& checks) {
  checks.section("streamed_tiles, job_order", "tiles of rows");
  const FoldShape shape = shape_of(fold, kHeads * kGroup, section);
  const RowSchedule<kRows, kColumns> schedule{shape};
  const auto tiles = streamed_tiles(fold, true, kRows, kColumns);
  const auto order = job_order(fold, true, tiles.size(), kHeads * kGroup, section);
  CHECK(checks, order.size() == static_cast<std::size_t>(schedule.jobs()), order.size(), schedule.jobs());
  for (std::size_t i = 0; i < order.size(); ++i) {
    const RowJob job = schedule(static_cast<int>(i));
    const auto [tile, head] = order[i];
    CHECK(checks, job.row0 == tile * kRows && job.head == head, job.row0, job.head, tile, head);
    const TileRange streamed = tiles[tile];
    CHECK(checks, job.tiles == streamed.end - streamed.begin, job.tiles, streamed.begin, streamed.end);
    CHECK(checks, job.tiles == 0 || job.first_tile == streamed.begin, job.first_tile, streamed.begin);
  }
}

void check_columns(const BandedFold& fold, int section, Checks& checks) {
  checks.section("streamed_tiles, job_order", "tiles of columns");
  const FoldShape shape = shape_of(fold, kHeads * kGroup, section);
  const auto tiles = streamed_tiles(fold, false, kColumns, kRows);
  const auto order = job_order(fold, false, tiles.size(), kHeads, section);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const ColumnJob job = column_job<kRows, kColumns>(shape, static_cast<int>(i));
    const auto [tile, head] = order[i];
    CHECK(checks, job.column0 == tile * kColumns && job.column_head == head, job.column0, job.column_head,
          tile, head);
    const TileRange streamed = tiles[tile];
    CHECK(checks, job.tiles == streamed.end - streamed.begin, job.tiles, streamed.begin, streamed.end);
    CHECK(checks, job.tiles == 0 || job.first_tile == streamed.begin, job.first_tile, streamed.begin);
  }
}

void check_splits(const BandedFold& fold, int splits, Checks& checks) {
  checks.section("split_tiles", "splits of packed tiles of rows");
  const FoldShape shape = shape_of(fold, kHeads * kGroup, 1);
  const Packing packing{kGroup, kRows, splits};
  const PackedSchedule<kColumns> schedule{shape, packing};
  const auto tiles = streamed_tiles(fold, true, kRows, kColumns);
  for (int i = 0; i < schedule.jobs(); ++i) {
    const PackedJob job = schedule(i);
    const TileRange streamed = tiles[job.row0 / kRows];
    const std::int64_t expected = split_tiles(streamed.end - streamed.begin, splits)[job.split];
    CHECK(checks, job.tiles == expected, job.tiles, expected, job.row0, job.split);
  }
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  using namespace monoidreduce;
  test::Checks checks;
  for (const std::int64_t rows : {1, 7, 20})
    for (const std::int64_t columns : {1, 6, 23})
      for (const std::int64_t left : {-1, 0, 4})
        for (const std::int64_t right : {-1, 0, 5}) {
          const BandedFold fold{rows, columns, left, right};
          for (const int section : {1, 2, 4}) {
            test::check_rows(fold, section, checks);
            test::check_columns(fold, section, checks);
          }
          for (const int splits : {1, 2, 5}) test::check_splits(fold, splits, checks);
        }
  return checks.finish();
}
