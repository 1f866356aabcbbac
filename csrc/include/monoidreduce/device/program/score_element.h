// What functions that modify scores see of an element. They are a generated type P (monoidreduce/folds/cuda/cuda_source.py):
//
//   Real               float or double, or ScoreReal, or WeightReal
//   kWeights           is the new score a weight (attend)
//   kMasked            may elements be absent
//   kOfSequences       do rows and columns belong to packed sequences
//   kPlain             is the new score the score
//   kSteps             is the new score the score, a number of the row, and a step of the row times the position
//   kOfDistance        and does it see of query and position only their distance
//   score(element)     the new score
//   keeps(element)     is it kept
//   slope(element)     the derivative of the new score by the score
//   step(element)      the step
#pragma once

#include <cstdint>

#include "monoidreduce/device/program/statistics.h"

namespace monoidreduce {

// A block's word (BlockMask.links, monoidreduce/folds/block_mask.py): its kind, 0 where nothing is kept and 2 where
// all is. It also has the next block of a kind other than 0, itself counted, along the queries' line and
// along the keys'.
struct BlockWord {
  static constexpr int kAcross = 2, kDown = 33, kBits = 30;  // where the numbers of the next blocks are
  std::int64_t word;
  MR_HD int kind() const { return static_cast<int>(word & 3); }
  MR_HD int next(int place) const { return static_cast<int>(word >> place & ((1 << kBits) - 1)); }
};

// The blocks that some rows of a head meet, or some columns: a few lines of blocks, from the first block to the last.
struct BlockStrip {
  const std::int64_t* words;   // of the first block of the first line; or null: there are no blocks
  std::int64_t along, across;  // strides, to the next block of a line and to the next line
  int lines, block, size;      // columns (or rows) of a block, and of all
  int place;                   // of a line's next block

  // The first tile of kSize columns (or rows), from `tile` on, that meets a block of a kind other than 0. If
  // no tile before `end` does, it is `end`.
  template <int kSize>
  MR_HD int next(int tile, int end) const {
    if (words == nullptr || tile >= end) return tile;
    int found = 1 << BlockWord::kBits;
    for (int line = 0; line < lines; ++line) {
      const int here = BlockWord{words[line * across + first_block<kSize>(tile) * along]}.next(place);
      found = here < found ? here : found;
    }
    if (std::int64_t{found} * block >= size) return end;
    const int first = block == kSize ? found : found * block / kSize;
    return first >= end ? end : first > tile ? first : tile;
  }
  // Are all blocks that the tile meets of kind 2.
  template <int kSize>
  MR_HD bool whole(int tile) const {
    if (words == nullptr) return false;
    const int behind = (tile + 1) * kSize < size ? (tile + 1) * kSize : size;
    const int last = block == kSize ? tile : (behind - 1) / block;
    for (int line = 0; line < lines; ++line) {
      for (int at = first_block<kSize>(tile); at <= last; ++at) {
        if (BlockWord{words[line * across + at * along]}.kind() != 2) return false;
      }
    }
    return true;
  }

 private:
  // Most blocks are as large as tiles, and a division takes as long as a wait for memory.
  template <int kSize>
  MR_HD int first_block(int tile) const {
    return block == kSize ? tile : tile * kSize / block;
  }
};

// Of a call; the same for all functions.
struct ModifiedScoresData {
  static constexpr int kMostSizes = 24;
  ProgramTables tables;
  const std::int64_t* blocks;  // their words; or null
  std::int64_t block_stride[4];
  int block_rows, block_columns, rows, columns;
  float scale;  // of dot products
  int size[kMostSizes];

  // Does a tile meet a block of a kind other than 0.
  MR_HD bool touches(int batch, int head, int row0, int row_count, int column0, int column_count) const {
    const int last_row = (row0 + row_count < rows ? row0 + row_count : rows) - 1,
              last_column = (column0 + column_count < columns ? column0 + column_count : columns) - 1;
    for (int y = row0 / block_rows; y <= last_row / block_rows; ++y) {
      const std::int64_t word = blocks[batch * block_stride[0] + head * block_stride[1] +
                                       y * block_stride[2] + column0 / block_columns * block_stride[3]];
      if (BlockWord{word}.next(BlockWord::kAcross) <= last_column / block_columns) return true;
    }
    return false;
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
    if (blocks == nullptr) return {nullptr, 0, 0, 0, block, size, 0};
    const int line = first / lines_of_block, last = (first + count < of ? first + count : of) - 1;
    const std::int64_t* const begin =
        blocks + batch * block_stride[0] + head * block_stride[1] + line * block_stride[axis];
    return {begin,
            block_stride[5 - axis],
            block_stride[axis],
            last / lines_of_block - line + 1,
            block,
            size,
            axis == 2 ? BlockWord::kAcross : BlockWord::kDown};
  }
};

// An element, with its numbers as reals too: sums of a base and a constant, so that no element is converted.
// distance: from the query to the position; most biases by position are functions of it.
template <class R>
struct ScoreElement {
  R score;  // scaled
  Index<R> batch, head, query, position;
  R real_query, real_position, real_distance;
  const ProgramTables& tables;
  const int* size;
};

}  // namespace monoidreduce
