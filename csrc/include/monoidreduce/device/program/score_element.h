// What functions that modify scores see of an element. The functions are a generated type P
// (monoidreduce/folds/cuda/cuda_source.py):
//
//   Real               float or double, or ScoreReal, or WeightReal
//   kWeights           the new score is a weight (attend)
//   kMasked            elements may be masked
//   kOfSequences       rows and columns belong to packed sequences
//   kPlain             the new score is the score
//   kSteps             the new score is the score plus a number of the row plus a step of the row times the position
//   kOfDistance        and of query and position, it depends only on their distance
//   kHidesNan          the new score may be a number where the score is NaN; of weights, their derivative too
//   score(element)     the new score
//   keeps(element)     false: the element is masked
//   slope(element)     the derivative of the new score with respect to the score
//   step(element)      the step
//   drops(element)     only with dropout: whether the element's weight is dropped
//   kept_factor(element)  only with dropout: the factor of weights that are kept, the same for all elements
//
// and, if the kernel sums gradients of tables (table_gradient.cuh), for each gather n below kGathers:
//
//   kEntryOf[n]        what the entry depends on
//   kTableSum          what the kernel does with the entries' gradients
//   entry<n>(element)  the number of the entry in the table of reals
//   by_gathered<n>(element)  the derivative of the new score with respect to what was gathered
#pragma once

#include <cstdint>

#include "monoidreduce/device/program/statistics.h"

namespace monoidreduce {

// Whether functions drop weights.
template <class P>
inline constexpr bool kDrops = false;
template <class P>
  requires requires { &P::drops; }
inline constexpr bool kDrops<P> = true;

// By what a gather indexes its table, apart from batch and head: by the query alone or by neither (kRow), by the key alone
// (kColumn), or by both (kElement).
enum class EntryOf { kColumn, kElement, kRow };
// What the kernel does with the gradients that elements add to the entries of the table (table_gradient.cuh).
enum class TableSum { kFloats, kLargest, kIntegers };
// The number of gathers whose entries' gradients the kernel sums.
template <class P>
inline constexpr int kGathers = 0;
template <class P>
  requires requires { P::kGathers; }
inline constexpr int kGathers<P> = P::kGathers;
// Whether there are such gathers by row, or others.
template <class P>
constexpr bool gathers(bool by_row) {
  if constexpr (kGathers<P> > 0) {
    for (int n = 0; n < kGathers<P>; ++n) {
      if ((P::kEntryOf[n] == EntryOf::kRow) == by_row) return true;
    }
  }
  return false;
}

// One block of a block mask as a word (BlockMask.links, monoidreduce/folds/block_mask.py). It has the block's kind:
// 0 if it keeps nothing, 2 if it keeps all. It also has the index of the next block of another kind than 0,
// starting with the block itself, across (along its line of queries) and down (along its line of keys).
struct BlockWord {
  static constexpr int kAcross = 2, kDown = 33, kBits = 30;  // bit positions and length of these indices
  std::int64_t word;
  MR_HD int kind() const { return static_cast<int>(word & 3); }
  MR_HD int next(int place) const { return static_cast<int>(word >> place & ((1 << kBits) - 1)); }
};

// The blocks of a block mask that some rows of a head meet, or some columns: a few lines of blocks, from the
// first to the last block. There are one to three lines in most calls: loops over them are not unrolled, since
// each copy of the code takes the compiler time, at a user's first call.
struct BlockStrip {
  const std::int64_t* words;   // of the first block of the first line; null: there is no block mask
  std::int64_t along, across;  // strides to the next block of a line, and to the next line
  int lines, block, size;      // block: columns (or rows) of a block; size: of all blocks
  int place;                   // BlockWord::kAcross or kDown

  // The first tile of kSize columns (or rows), from `tile` on, that meets a block of another kind than 0;
  // `end` if there is none before `end`.
  template <int kSize>
  MR_HD int next(int tile, int end) const {
    if (words == nullptr || tile >= end) return tile;
    int found = 1 << BlockWord::kBits;
    MR_ROLL for (int line = 0; line < lines; ++line) {
      const int here = BlockWord{words[line * across + first_block<kSize>(tile) * along]}.next(place);
      found = here < found ? here : found;
    }
    if (std::int64_t{found} * block >= size) return end;
    const int first = block == kSize ? found : found * block / kSize;
    return first >= end ? end : first > tile ? first : tile;
  }
  // Whether all blocks that the tile meets keep all (kind 2).
  template <int kSize>
  MR_HD bool whole(int tile) const {
    if (words == nullptr) return false;
    const int behind = (tile + 1) * kSize < size ? (tile + 1) * kSize : size;
    const int last = block == kSize ? tile : (behind - 1) / block;
    MR_ROLL for (int line = 0; line < lines; ++line) {
      MR_ROLL for (int at = first_block<kSize>(tile); at <= last; ++at) {
        if (BlockWord{words[line * across + at * along]}.kind() != 2) return false;
      }
    }
    return true;
  }

 private:
  // Most blocks are as large as tiles, and a division takes as long as waiting for memory.
  template <int kSize>
  MR_HD int first_block(int tile) const {
    return block == kSize ? tile : tile * kSize / block;
  }
};

// The data of a call that modifies scores; the same type for all functions.
struct ModifiedScoresData {
  static constexpr int kMostSizes = 24;
  ProgramTables tables;
  const std::int64_t* blocks;  // BlockWord::word of each block, or null
  std::int64_t block_stride[4];
  int block_rows, block_columns, rows, columns;
  float scale;  // scale of dot products
  int size[kMostSizes];
  void* d_table = nullptr;  // of each entry of the table of reals, what P::kTableSum says
  std::int64_t* table_integers = nullptr;

  // Whether a tile meets a block of another kind than 0.
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
  // The lines of the strip are [first, first + count) of `of` along `axis`, in blocks of lines_of_block;
  // block and size are those along a line.
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

// An element. Its indices are given as reals too: these are sums of a base and a constant, so that no element
// needs a conversion. real_distance: position - query; most biases by position are functions of it.
template <class R>
struct ScoreElement {
  R score;  // the scaled dot product
  Index<R> batch, head, query, position;
  R real_query, real_position, real_distance;
  const ProgramTables& tables;
  const int* size;
  // The indices as random numbers take them. Kernels of fragments know bit 3 of both when they are compiled.
  Paired paired_query = query, paired_position = position;
};

}  // namespace monoidreduce
