// The tile scheduler of the contraction: which tiles a cluster (on sm_80: a block) computes, in which order.
//
// Row blocks are grouped so that the rows of a group fit into the L2 cache. All clusters work on one group at
// a time. They take its tiles in turn: all row blocks of one column tile, then of the next.
//
// The number of row blocks of a group divides the number of clusters. So a cluster has the same row block
// throughout a group, and keeps the states of its rows in registers. Waves continue from group to group, so
// only the very last wave is not full.
#pragma once

#include <cstdint>

#include "monoidreduce/math.h"

namespace monoidreduce {

// Lanes that combine the partial states of a row: each lane an equal share, then all lanes pairwise. When
// they were combined one after another, the sum of 11 partial totals was 1.9e-4 off 607, and the tests'
// tolerance is 1.8e-4.
inline constexpr int kCombiningLanes = 8;

struct TileSchedule {
  int clusters, row_blocks, column_tiles;
  int most;  // the largest number of row blocks in a group

  // A cluster's part of a group: tiles start, start + clusters, ... of the group's count * column_tiles
  // tiles.
  struct Group {
    int index, first, count;  // row blocks [first, first + count); count 0: there are no more groups
    int start;
    MR_HD int row_block() const { return first + start % count; }
  };
  MR_HD int tiles(const Group& group) const { return group.count * column_tiles; }
  MR_HD int column_tile(const Group& group, int tile) const { return tile / group.count; }
  MR_HD int count(int first) const {
    const int left = row_blocks - first;
    int n = left < most ? left : most;
    while (n > 0 && clusters % n != 0) --n;
    return n;
  }
  MR_HD Group first(int cluster) const { return {0, 0, count(0), cluster}; }
  MR_HD Group next(const Group& group) const {
    const int first = group.first + group.count, start = (group.start - tiles(group)) % clusters;
    return {group.index + 1, first, count(first), start < 0 ? start + clusters : start};
  }
  // The group of a row block, as the cluster sees it that starts with this row block's first tile.
  MR_HD Group group_of(int row_block) const {
    Group group{0, 0, count(0), 0};
    for (; group.first + group.count <= row_block; ++group.index) {
      group.first += group.count;
      group.count = count(group.first);
    }
    group.start = row_block - group.first;
    return group;
  }
  MR_HD int groups() const { return row_blocks == 0 ? 0 : group_of(row_blocks - 1).index + 1; }
  // The same schedule for another number of row blocks.
  MR_HD TileSchedule with_row_blocks(int blocks) const { return {clusters, blocks, column_tiles, most}; }
  // The largest number of groups for this or any smaller number of row blocks (fewer row blocks may make more
  // groups).
  MR_HD int most_groups() const {
    const int whole = with_row_blocks(most).count(0);
    int left = 0;
    for (int blocks = 1; blocks < whole && blocks <= row_blocks; ++blocks) {
      const int groups = with_row_blocks(blocks).groups();
      left = left < groups ? groups : left;
    }
    return row_blocks / whole + left;
  }
};

}  // namespace monoidreduce
