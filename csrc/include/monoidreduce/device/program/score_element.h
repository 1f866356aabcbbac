// What functions that modify scores see of an element. They are a generated type P (monoidreduce/program/cuda_source.py):
//
//   Real               float or double, or ScoreReal
//   kMasked            may elements be absent
//   kOfSequences       are rows and columns those of packed sequences
//   kSteps             is the new score the score, a number of the row, and a step of the row times the position
//   score(element)     the new score
//   keeps(element)     is it kept
//   slope(element)     the derivative of the new score by the score
//   step(element)      the step
#pragma once

#include <cstdint>

#include "monoidreduce/device/program/statistics.h"

namespace monoidreduce {

// The blocks that some rows of a head meet, or some columns: a few lines of blocks, from the first block to the last.
struct BlockStrip {
  const std::int64_t* kinds;   // of the first block of the first line; or null: there are no blocks
  std::int64_t along, across;  // strides, to the next block of a line and to the next line
  int lines, block, size;      // columns (or rows) of a block, and of all

  // The first tile of kSize columns (or rows), from `tile` on, that meets a block of a kind other than 0; `end` if no tile
  // before that one does. Several kinds are loaded together: a wait for each would take as long as a tile's products.
  template <int kSize>
  MR_HD int next(int tile, int end) const {
    if (kinds == nullptr || tile >= end) return tile;
    constexpr int kTogether = 4;
    const int last = ((end * kSize < size ? end * kSize : size) - 1) / block;
    for (int at = tile * kSize / block; at <= last; at += kTogether) {
      int found = kTogether;
      for (int line = 0; line < lines; ++line) {
        for (int n = kTogether - 1; n >= 0; --n) {
          if (at + n <= last && kinds[line * across + (at + n) * along] != 0) found = n < found ? n : found;
        }
      }
      const int first = (at + found) * block / kSize;
      if (found < kTogether) return first > tile ? first : tile;
    }
    return end;
  }
};

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
  MR_HD BlockStrip strip_of_rows(int batch, int head, int row0, int row_count) const {
    return strip(batch, head, 2, row0, row_count, block_rows, rows, block_columns, columns);
  }
  MR_HD BlockStrip strip_of_columns(int batch, int head, int column0, int column_count) const {
    return strip(batch, head, 3, column0, column_count, block_columns, columns, block_rows, rows);
  }

 private:
  // axis: of the lines that the strip is of, [first, first + count) of `of`, in blocks of so many; block, size: along it.
  MR_HD BlockStrip strip(int batch, int head, int axis, int first, int count, int lines_of_block, int of,
                         int block, int size) const {
    if (kinds == nullptr) return {nullptr, 0, 0, 0, block, size};
    const int line = first / lines_of_block, last = (first + count < of ? first + count : of) - 1;
    const std::int64_t* const begin =
        kinds + batch * kinds_stride[0] + head * kinds_stride[1] + line * kinds_stride[axis];
    return {begin, kinds_stride[5 - axis], kinds_stride[axis], last / lines_of_block - line + 1, block, size};
  }
};

// An element, with its numbers as reals too: sums of a base and a constant, so that no element is converted. distance: from
// the query to the position, of which most biases by position are functions.
template <class R>
struct ScoreElement {
  R score;  // scaled
  Index<R> batch, head, query, position;
  R real_query, real_position, real_distance;
  const ProgramTables& tables;
  const int* size;
};

}  // namespace monoidreduce
