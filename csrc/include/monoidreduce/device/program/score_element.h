// What functions that modify scores see of an element. They are a generated type P (monoidreduce/program/cuda_source.py):
//
//   Real               float or double, or ElementReal
//   kMasked            may elements be absent
//   kOfSequences       are rows and columns those of packed sequences
//   score(element)     the new score
//   keeps(element)     is it kept
//   slope(element)     the derivative of the new score by the score
#pragma once

#include <cstdint>

#include "monoidreduce/device/program/statistics.h"

namespace monoidreduce {

// Of a call; the same for all functions.
struct ModifiedScoresData {
  static constexpr int kMostSizes = 24;
  ProgramTables tables;
  const std::int64_t* kinds;  // of blocks, as BlockMask (monoidreduce/block_mask.py) has them; or null
  std::int64_t kinds_stride[4];
  int block_rows, block_columns, rows, columns;
  float scale;  // of dot products
  int size[kMostSizes];

  // The least and the largest kind of the blocks that a tile meets.
  struct Kinds {
    int least, most;
  };
  MR_HD Kinds kinds_of(int batch, int head, int row0, int row_count, int column0, int column_count) const {
    Kinds found{2, 0};
    const int last_row = (row0 + row_count < rows ? row0 + row_count : rows) - 1,
              last_column = (column0 + column_count < columns ? column0 + column_count : columns) - 1;
    for (int y = row0 / block_rows; y <= last_row / block_rows; ++y) {
      for (int x = column0 / block_columns; x <= last_column / block_columns; ++x) {
        const int kind = static_cast<int>(kinds[batch * kinds_stride[0] + head * kinds_stride[1] +
                                                y * kinds_stride[2] + x * kinds_stride[3]]);
        found.least = kind < found.least ? kind : found.least;
        found.most = kind > found.most ? kind : found.most;
      }
    }
    return found;
  }
};

// An element, with its numbers as reals too: sums of a base and a constant, so that no element is converted.
template <class R>
struct ScoreElement {
  R score;  // scaled
  Index<R> batch, head, query, position;
  R real_query, real_position;
  const ProgramTables& tables;
  const int* size;
};

}  // namespace monoidreduce
