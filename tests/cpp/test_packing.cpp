// Tests the packing of few rows (packing.h). Every row is in a tile, tiles fit, no split is without columns, and columns are
// not split where that would take longer.
#include "monoidreduce/launch/packing.h"

#include <algorithm>

#include "check.h"

namespace monoidreduce::test {
namespace {

constexpr int kMultiprocessors = 132;

FoldProblem problem(std::int64_t batch, std::int64_t group, std::int64_t column_heads, std::int64_t rows,
                    std::int64_t columns) {
  FoldProblem p{};
  p.a.rank = p.b.rank = 4;
  p.a.size[0] = p.b.size[0] = batch;
  p.a.size[1] = group * column_heads, p.b.size[1] = column_heads;
  p.a.size[2] = rows, p.b.size[2] = columns;
  return p;
}

// How long the work takes: the number of waves on the SMs, times the column tiles of a wave.
std::int64_t length(std::int64_t row_tiles, std::int64_t column_tiles, std::int64_t splits) {
  return parts_of(row_tiles * splits, kMultiprocessors) * parts_of(column_tiles, splits);
}

void check_packing(Checks& checks) {
  constexpr int kColumnTile = 128;
  for (const std::int64_t group : {1, 2, 3, 4, 5, 8, 16, 63, 64, 65, 96, 128, 300}) {
    for (const std::int64_t rows : {1, 2, 7, 16, 33, 63, 64, 65, 100, 500}) {
      const FoldProblem p = problem(3, group, 2, rows, 4099);
      const Packing packing = pack_rows(p, kColumnTile, kMultiprocessors);
      checks.section("packing", "a tile holds its lines, and no tile is empty");
      CHECK(checks, packing.heads * packing.rows <= kPackedLines, group, rows, packing.heads, packing.rows);
      CHECK(checks, packing.heads <= group && packing.rows <= rows, group, rows, packing.heads, packing.rows);
      const std::int64_t head_tiles = parts_of(group, packing.heads),
                         row_tiles = parts_of(rows, packing.rows);
      CHECK(checks, packed_tiles(p, packing) == 6 * head_tiles * row_tiles, group, rows);
      checks.section("packing", "no more tiles than half full ones");
      CHECK(checks, head_tiles * row_tiles * kPackedLines <= 4 * group * rows + 4 * kPackedLines, group, rows,
            head_tiles, row_tiles);
    }
  }
}

void check_splits(Checks& checks) {
  for (std::int64_t row_tiles = 1; row_tiles < 700; row_tiles = row_tiles * 5 / 4 + 1) {
    for (std::int64_t column_tiles = 0; column_tiles < 5000; column_tiles = column_tiles * 3 / 2 + 1) {
      const int splits = splits_of(row_tiles, column_tiles, kMultiprocessors);
      checks.section("splits", "each has columns");
      CHECK(checks, splits == 1 || (splits - 1) * parts_of(column_tiles, splits) < column_tiles, row_tiles,
            column_tiles, splits);
      checks.section("splits", "they shorten the work");
      CHECK(checks,
            splits == 1 || length(row_tiles, column_tiles, splits) < length(row_tiles, column_tiles, 1),
            row_tiles, column_tiles, splits);
      checks.section("splits", "many columns and few rows have some");
      CHECK(checks, splits > 1 || row_tiles * 2 > kMultiprocessors || column_tiles < 10, row_tiles,
            column_tiles);
      checks.section("splits", "no more than the most");
      for (const std::int64_t most : {0, 1, 2, 5, 30})
        CHECK(checks,
              splits_of(row_tiles, column_tiles, kMultiprocessors, most) <= std::max<std::int64_t>(most, 1),
              row_tiles, column_tiles, most);
    }
  }
  checks.section("splits", "a full grid has none");
  CHECK(checks, splits_of(kMultiprocessors, 1000, kMultiprocessors) == 1);
}

void check_few(Checks& checks) {
  checks.section("few rows", "up to a tile, or of half of the multiprocessors");
  const auto few = [](std::int64_t batch, std::int64_t rows) {
    return pack_few_rows(problem(batch, 1, 1, rows, 5000), 128, kMultiprocessors).has_value();
  };
  CHECK(checks, few(1, 1) && few(1000, 64) && !few(1000, 65));
  CHECK(checks, few(1, 66 * 128) && !few(1, 66 * 128 + 1));
}

void check_kept_columns(Checks& checks) {
  checks.section("kept columns", "by range");
  FoldProblem p = problem(1, 4, 1, 10, 5000);
  const Packing packing{4, 10, 1};
  CHECK(checks, unmasked_columns(p, packing) == 5000);
  p.range = {100, ColumnRange::kUnbounded, 4990};
  CHECK(checks, unmasked_columns(p, packing) == 5000);
  p.range = {100, 20, 4990};
  CHECK(checks, unmasked_columns(p, packing) == 130);
  p.range = {10000, 20, 4990};
  CHECK(checks, unmasked_columns(p, packing) == 5000);
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  monoidreduce::test::Checks checks;
  monoidreduce::test::check_packing(checks);
  monoidreduce::test::check_splits(checks);
  monoidreduce::test::check_few(checks);
  monoidreduce::test::check_kept_columns(checks);
  return checks.finish();
}
