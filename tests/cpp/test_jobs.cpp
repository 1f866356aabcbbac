// Compares the jobs that csrc/plan tells the cost model with those that the kernels' schedulers find on the device.
#include <algorithm>
#include <utility>
#include <vector>

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
#include "monoidreduce/launch/job_split.h"

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

// Every tile of every head of a job is in one part. Parts have the places of their job in turn, and the last one joins.
void check_parts(const BandedFold& fold, int section, const PartsOfJob& parts, Checks& checks) {
  checks.section("JobNumbers", "parts of tiles of columns");
  const FoldShape shape = shape_of(fold, kHeads * kGroup, section);
  const int jobs = kHeads * static_cast<int>((fold.columns + kColumns - 1) / kColumns), count = parts.count();
  unsigned counter = 0;
  const JobNumbers numbers(jobs, parts, {}, &counter);
  int number = numbers.first();
  for (int index = 0; index < jobs; ++index) {
    const ColumnJob whole = column_job<kRows, kColumns>(shape, index);
    std::vector<int> found((whole.end_head - whole.first_head) *
                           whole.tiles);  // in how many parts each tile is
    for (int n = 0; n < count; ++n, number = numbers.next(number)) {
      CHECK(checks, number == index * count + n && !numbers.in_tail(number), number, index, n);
      const ColumnJob job = column_job<kRows, kColumns>(shape, numbers, number);
      CHECK(checks, job.column0 == whole.column0 && job.column_head == whole.column_head, index, n);
      CHECK(checks, job.end_head - job.first_head <= parts_of(kGroup, parts.heads), job.end_head, n);
      CHECK(checks, job.tiles <= parts_of(whole.tiles, parts.rows), job.tiles, n);
      const bool within = job.first_head >= whole.first_head && job.end_head <= whole.end_head &&
                          job.first_tile >= whole.first_tile &&
                          job.first_tile + job.tiles <= whole.first_tile + whole.tiles;
      CHECK(checks, within, index, n, job.first_head, job.first_tile, job.tiles);
      if (!within) return;
      for (int head = job.first_head; head < job.end_head; ++head)
        for (int tile = job.first_tile; tile < job.first_tile + job.tiles; ++tile)
          ++found[(head - whole.first_head) * whole.tiles + tile - whole.first_tile];
      const JobPart part = numbers.part(number);
      CHECK(checks, part.whole() == (count == 1), index, n);
      if (count == 1) continue;
      const int first = index * (count - 1);
      CHECK(checks, part.first == first && part.last == first + count - 1, part.first, index);
      CHECK(checks, part.own == first + n && part.joins() == (n == count - 1), part.own, index);
    }
    CHECK(checks, std::all_of(found.begin(), found.end(), [](int times) { return times == 1; }), index,
          count);
  }
  CHECK(checks, number == numbers.end(), number, jobs, count);
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

FoldProblem problem(std::int64_t batch, std::int64_t column_heads, std::int64_t group,
                    const BandedFold& fold) {
  FoldProblem p;
  for (TensorView* const t : {&p.a, &p.b}) t->size[0] = batch, t->size[3] = 128;
  p.a.size[1] = column_heads * group, p.a.size[2] = fold.rows;
  p.b.size[1] = column_heads, p.b.size[2] = fold.columns;
  p.range.left = fold.left, p.range.right = fold.right, p.range.shift = fold.columns - fold.rows;
  return p;
}

// The time until the last of so many blocks is done, in row tiles, where free blocks take the parts in turn.
std::int64_t makespan(const FoldProblem& p, const BandedFold& fold, TileSize tile, const PartsOfJob& parts,
                      int blocks) {
  std::vector<std::int64_t> ends(blocks);
  for (const TileRange& streamed : streamed_tiles(fold, false, tile.columns, tile.rows)) {
    for (int n = 0; n < p.batch() * p.column_heads() * parts.count(); ++n) {
      ColumnJob job{0,
                    0,
                    0,
                    0,
                    static_cast<int>(p.heads() / p.column_heads()),
                    static_cast<int>(streamed.begin),
                    static_cast<int>(streamed.end - streamed.begin)};
      job.take_heads(n % parts.heads, parts.heads);
      job.take_part(n / parts.heads % parts.rows, parts.rows);
      *std::min_element(ends.begin(), ends.end()) += (job.end_head - job.first_head) * job.tiles;
    }
  }
  return *std::max_element(ends.begin(), ends.end());
}

void check_choice_of_parts(Checks& checks) {
  constexpr TileSize kTile{64, 128};
  const DeviceFacts h100{9, 0, 132, 0, 0};
  const auto is = [&](const FoldProblem& p, int heads, int rows) {
    checks.section("backward_parts", "of heads and of rows");
    const PartsOfJob parts = backward_parts(kTile, p, h100);
    CHECK(checks, parts.heads == heads && parts.rows == rows, parts.heads, parts.rows, heads, rows);
  };
  const BandedFold causal{4096, 4096, -1, 0};
  // Two heads of a group.
  is(problem(2, 32, 1, causal), 1, 1);
  is(problem(2, 16, 2, causal), 1, 1);
  is(problem(2, 8, 4, causal), 2, 1);
  is(problem(2, 4, 7, causal), 4, 1);
  is(problem(2, 2, 16, causal), 8, 1);
  // Few jobs.
  is(problem(1, 4, 1, causal), 1, 2);
  is(problem(1, 1, 4, causal), 2, 4);
  is(problem(1, 1, 4, {4096, 4096, 0, -1}), 2, 4);
  is(problem(1, 4, 1, {4096, 1024, -1, 0}), 1, 1);
  // Short jobs.
  is(problem(1, 1, 1, {512, 512, -1, 0}), 1, 1);
  is(problem(1, 1, 1, {2048, 2048, -1, 0}), 1, 2);
  is(problem(1, 1, 8, {256, 256, -1, 0}), 2, 1);
  // No mask, a window, packed sequences, no keys.
  is(problem(1, 2, 16, {4096, 4096, -1, -1}), 1, 1);
  is(problem(1, 2, 16, {4096, 4096, 1024, 0}), 1, 1);
  FoldProblem packed = problem(1, 2, 16, causal);
  packed.range.listed = true;
  is(packed, 1, 1);
  is(problem(1, 2, 16, {4096, 0, -1, 0}), 1, 1);

  for (const std::int64_t length : {2048, 4096, 8192})
    for (const std::int64_t heads : {1, 2, 4, 8, 16}) {
      checks.section("backward_parts", "blocks end together: at most a fifth after an even share");
      const BandedFold fold{length, length, -1, 0};
      const FoldProblem p = problem(1, heads, 32 / heads, fold);
      const std::int64_t even = makespan(p, fold, kTile, {}, 1) / h100.multiprocessors;
      const PartsOfJob parts = backward_parts(kTile, p, h100);
      const std::int64_t split = makespan(p, fold, kTile, parts, h100.multiprocessors);
      CHECK(checks, 5 * split <= 6 * even, length, heads, parts.heads, parts.rows, split, even);
    }

  checks.section("backward_job_split",
                 "slots for all parts but the joining ones, for some of many, or of the tail");
  CHECK(checks, backward_job_split(kTile, problem(1, 1, 4, causal), false, h100).slots == 32 * 7);
  CHECK(checks, backward_job_split(kTile, problem(2, 2, 16, causal), false, h100).slots == 264);
  CHECK(checks, backward_job_split(kTile, problem(1, 1, 1024, causal), false, h100).slots == 511);
  const JobSplit even = backward_job_split(kTile, problem(1, 2, 16, {4096, 4096, -1, -1}), true, h100);
  CHECK(checks, even.parts.count() == 1 && even.tail.jobs == 64 && even.slots == even.tail.blocks,
        even.slots);
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
            for (const PartsOfJob parts : {PartsOfJob{}, {2, 1}, {1, 3}, {2, 8}})
              test::check_parts(fold, section, parts, checks);
          }
          for (const int splits : {1, 2, 5}) test::check_splits(fold, splits, checks);
        }
  test::check_choice_of_parts(checks);
  return checks.finish();
}
