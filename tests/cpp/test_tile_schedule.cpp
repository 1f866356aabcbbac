// Tests the tile schedule of contractions. Every tile is computed once, all waves but the last are full, and the kernel that
// combines reads every partial state of a row once.
#include "monoidreduce/device/schedule/tile_schedule.cuh"

#include <algorithm>
#include <set>
#include <utility>

#include "check.h"

namespace monoidreduce::test {
namespace {

void check_schedule(const TileSchedule& s, Checks& checks) {
  std::set<std::pair<int, int>> tiles;       // (row block, column tile)
  std::set<std::pair<int, int>> left, read;  // (group, start) of the partial states that are stored, and read
  int fewest = s.row_blocks * s.column_tiles, most = 0, visits = 0;
  for (int cluster = 0; cluster < s.clusters; ++cluster) {
    int taken = 0;
    for (auto group = s.first(cluster); group.count > 0; group = s.next(group)) {
      checks.section("TileSchedule", "a cluster keeps its row block for all of a group");
      CHECK(checks, s.clusters % group.count == 0 && group.count <= s.most, group.count, s.clusters);
      CHECK(checks, 0 <= group.start && group.start < s.clusters, group.start, s.clusters);
      left.insert({group.index, group.start});
      for (int tile = group.start; tile < s.tiles(group); tile += s.clusters, ++taken) {
        CHECK(checks, group.first + tile % group.count == group.row_block(), tile, group.count);
        tiles.insert({group.row_block(), s.column_tile(group, tile)});
        ++visits;
      }
    }
    fewest = std::min(fewest, taken), most = std::max(most, taken);
  }
  checks.section("TileSchedule", "every tile once");
  const int all = s.row_blocks * s.column_tiles;
  CHECK(checks, visits == all && static_cast<int>(tiles.size()) == all, visits, all, s.clusters,
        s.row_blocks);
  checks.section("TileSchedule", "only the last wave is not full");
  CHECK(checks, most - fewest <= 1, fewest, most, s.clusters, s.row_blocks, s.column_tiles, s.most);

  for (int row_block = 0; row_block < s.row_blocks; ++row_block) {
    const auto group = s.group_of(row_block);
    checks.section("TileSchedule", "the group of a row block");
    CHECK(checks, group.row_block() == row_block && group.start < group.count, row_block, group.first);
    for (int start = group.start; start < s.clusters; start += group.count) {
      const bool fresh = read.insert({group.index, start}).second;
      CHECK(checks, fresh, group.index, start);
    }
  }
  checks.section("TileSchedule", "what is left is what is read");
  CHECK(checks, left == read, left.size(), read.size(), s.clusters, s.row_blocks, s.most);
  CHECK(checks, static_cast<int>(left.size()) == s.groups() * s.clusters, left.size(), s.groups());
  checks.section("TileSchedule", "places for the partial states of fewer rows");
  for (int row_blocks = 0; row_blocks <= s.row_blocks; ++row_blocks) {
    const int groups = s.with_row_blocks(row_blocks).groups();
    CHECK(checks, groups <= s.most_groups(), groups, row_blocks, s.row_blocks, s.clusters, s.most);
  }
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  monoidreduce::test::Checks checks;
  for (const int clusters : {1, 2, 7, 57, 66}) {
    for (const int row_blocks : {1, 2, 3, 16, 32, 61, 64}) {
      for (const int column_tiles : {1, 2, 31, 125, 501}) {
        for (const int most : {1, 5, 11, 66}) {
          const int used = std::min(clusters, row_blocks * column_tiles);
          monoidreduce::test::check_schedule({used, row_blocks, column_tiles, std::min(most, used)}, checks);
        }
      }
    }
  }
  return checks.finish();
}
