// The tile scheduler of the fused kernels: which jobs a block takes, and in which order. The kernels are
// persistent.
//
// A job (work tile) is a tile of rows, or of columns, of one batch and head. Heads are grouped into sections
// whose operands fit into the L2 cache together. In a section the longest jobs come first, so that the last
// ones to start are short.
//
// Blocks take jobs of different lengths from an atomic counter, if a block has more than one. So they do jobs of
// columns that wait for each other (semaphores.cuh). Other jobs have a fixed order. A job of columns may be split between blocks: every job
// if jobs differ in length, otherwise the last ones (stream_k_tail.h). Then the parts' sums are joined
// (stream_k_fixup.cuh).
#pragma once

#include <algorithm>

#include "monoidreduce/device/schedule/parts.h"
#include "monoidreduce/device/schedule/stream_k_tail.h"
#include "monoidreduce/score.h"

namespace monoidreduce {

inline constexpr int kSharedAlignment = 1024;  // bytes; the 128-byte swizzle needs it

// A ColumnRange that is a band, in 32 bits and with its shift added: row i keeps the columns [i - left, i +
// right] within the tensor. kFar: unbounded.
struct Band {
  static constexpr int kFar = 1 << 30;  // sums of two row or column indices fit an int
  int left, right;

  explicit Band(const ColumnRange& range)
      : left(range.left == ColumnRange::kUnbounded ? kFar : clamp(range.left - range.shift)),
        right(range.right == ColumnRange::kUnbounded ? kFar : clamp(range.right + range.shift)) {}
  __device__ __forceinline__ bool all() const { return left == kFar && right == kFar; }
  __device__ __forceinline__ int begin(int row) const { return ::max(row - left, 0); }
  __device__ __forceinline__ int end(int row, int columns) const {
    return ::max(::min(row + right + 1, columns), 0);
  }

 private:
  static int clamp(std::int64_t x) {
    return static_cast<int>(x < -kFar ? std::int64_t{-kFar} : x > kFar ? std::int64_t{kFar} : x);
  }
};

// The columns [begin, end), in 32 bits like all indices in kernels. (Span, which has 64, is in memory.)
struct Columns {
  int begin, end;
  __device__ __forceinline__ bool have(int column0, int count) const {
    return begin <= column0 && column0 + count <= end;
  }
};

struct FoldShape {
  int batch, heads, group;  // group: query heads that share a column head (GQA)
  int rows, columns;
  Band band;
  // Packed sequences: the columns that each row keeps, and the rows of each column, instead of the band; or
  // null.
  const Span *row_spans, *column_spans;
  bool masked_by_bias;  // masked by bias: a bool bias excludes elements
  // Consecutive jobs go through the batches of a head first; otherwise through the heads of a batch.
  bool batches_follow;
  int section;  // batch-heads in a section

  // The batch and the head of a batch-head index. heads: the number of heads, or of column heads.
  __device__ __forceinline__ int batch_of(int batch_head, int heads) const {
    return batches_follow ? batch_head % batch : batch_head / heads;
  }
  __device__ __forceinline__ int head_of(int batch_head, int heads) const {
    return batches_follow ? batch_head / batch : batch_head % heads;
  }
  // For kernels that no call with spans runs: code for spans would take registers, and others would spill.
  __device__ __forceinline__ FoldShape without_spans() const {
    FoldShape shape = *this;
    shape.row_spans = shape.column_spans = nullptr;
    return shape;
  }
  __device__ __forceinline__ bool banded() const { return row_spans || !band.all(); }
  __device__ __forceinline__ bool partial() const { return masked_by_bias || banded(); }
  // Row `row` keeps the columns [first_column, end_column). A row beyond the last is like the last one.
  __device__ __forceinline__ int first_column(int row) const {
    return row_spans ? int(row_spans[::min(row, rows - 1)].begin) : band.begin(row);
  }
  __device__ __forceinline__ int end_column(int row) const {
    return row_spans ? int(row_spans[::min(row, rows - 1)].end) : band.end(row, columns);
  }
  // The rows [first_row, end_row) keep column `column`. Some of them may be negative or beyond the last row.
  __device__ __forceinline__ int first_row(int column) const {
    return column_spans ? int(column_spans[::min(column, columns - 1)].begin) : column - band.right;
  }
  __device__ __forceinline__ int end_row(int column) const {
    return column_spans ? int(column_spans[::min(column, columns - 1)].end) : column + band.left + 1;
  }
  // The number of these rows; in a band it is the same for all columns.
  __device__ __forceinline__ unsigned rows_of(int column) const {
    return column_spans ? unsigned(end_row(column) - first_row(column))
                        : unsigned(band.left) + unsigned(band.right) + 1;
  }
  // The columns that all of the rows [row0, row0 + count) keep.
  __device__ __forceinline__ Columns kept_by_all(int row0, int count) const {
    return {first_column(row0 + count - 1), end_column(row0)};
  }
  // Whether all these rows keep all these columns. It does not call kept_by_all, which computes both ends:
  // with that, backward kernels took up to 1.07 times as long (H100, width 64, causal).
  __device__ __forceinline__ bool keeps_all(int row0, int row_count, int column0, int column_count) const {
    return first_column(row0 + row_count - 1) <= column0 && column0 + column_count <= end_column(row0);
  }
};

// A tile of rows of one head. (The lines of a PackedJob are rows of several heads.)
struct RowJob {
  int batch, head, row0;
  int first_tile, tiles;  // column tiles

  __device__ __forceinline__ int row_of(int line) const { return row0 + line; }
  __device__ __forceinline__ int head_of(int) const { return head; }
  // The number of rows that `lines` consecutive lines have in a head; a PackedJob has fewer.
  __device__ __forceinline__ int rows_of(int lines) const { return lines; }
  __device__ __forceinline__ bool has(const FoldShape& shape, int line) const {
    return row_of(line) < shape.rows;
  }
};

template <int kRows, int kColumns>
struct RowSchedule {
  using Job = RowJob;
  const FoldShape& shape;
  unsigned long long* counter = nullptr;  // in global memory, initially 0; null: jobs have a fixed order

  __device__ __forceinline__ int row_tiles() const { return (shape.rows + kRows - 1) / kRows; }
  __device__ __forceinline__ int jobs() const { return shape.batch * shape.heads * row_tiles(); }
  // The rows of a tile.
  __device__ __forceinline__ int lines() const { return kRows; }
  // The index of the calling block's next job, after job `index`.
  __device__ __forceinline__ int next(int index) const {
    return gridDim.x + (counter ? static_cast<int>(atomicAdd(counter, 1ull)) : index);
  }
  __device__ __forceinline__ RowJob operator()(int index) const {
    const int row_tiles = this->row_tiles(), section = index / (shape.section * row_tiles);
    const int first_head = section * shape.section, within = index - first_head * row_tiles;
    const int heads_here = ::min(shape.section, shape.batch * shape.heads - first_head);
    const int rank = within / heads_here, batch_head = first_head + within % heads_here;
    // If a row's last column is bounded (causal), later rows have more columns, and go first. With listed
    // spans, later rows of a sequence may have more.
    const bool ends = shape.row_spans || shape.band.right < Band::kFar;
    const int row_tile = ends ? row_tiles - 1 - rank : rank;
    const int row0 = row_tile * kRows, last_row = ::min(row0 + kRows, shape.rows) - 1;
    const int first_tile = shape.first_column(row0) / kColumns;
    const int end_tile = (shape.end_column(last_row) + kColumns - 1) / kColumns;
    return {shape.batch_of(batch_head, shape.heads), shape.head_of(batch_head, shape.heads), row0, first_tile,
            ::max(end_tile - first_tile, 0)};
  }
};

// One of `splits` splits of a job's tiles. All have as many tiles, except that the last ones have fewer or
// none.
struct TileSplit {
  int share, begin, tiles;  // tiles: of the whole job
  __device__ __forceinline__ TileSplit(int tiles, int split, int splits)
      : share((tiles + splits - 1) / splits), begin(::min(split * share, tiles)), tiles(tiles) {}
  __device__ __forceinline__ int count() const { return ::min(share, tiles - begin); }
};

// One split of the columns of a tile of rows.
struct SplitJob : RowJob {
  int split;
};

template <int kRows, int kColumns>
struct SplitSchedule {
  const FoldShape& shape;
  int splits;

  // Jobs that read the same columns are consecutive.
  __device__ __forceinline__ SplitJob operator()(int index) const {
    const RowSchedule<kRows, kColumns> whole{shape};
    SplitJob job{whole(index % whole.jobs()), index / whole.jobs()};
    const TileSplit own(job.tiles, job.split, splits);
    job.first_tile += own.begin, job.tiles = own.count();
    return job;
  }
};

// A part of a split job: the places (stream_k_fixup.cuh) of the job's first and last part, and of this one. Who
// has the last part joins all. A whole job has no places.
struct JobPart {
  int first = -1, last = -1, own = -1;
  __device__ __forceinline__ bool whole() const { return first < 0; }
  __device__ __forceinline__ bool joins() const { return own == last; }
};

// The numbers of the jobs, or of the parts of jobs, that the calling block takes; at last those of its parts of
// the stream-K tail. With a counter, a block takes a number only after all lower ones have been taken by blocks
// that are running: it may wait for these.
struct JobNumbers {
  unsigned* counter;  // in global memory, initially 0; null: the order is fixed
  PartsOfJob parts;   // of each job that is not in the tail
  int before_tail;    // the number of all these parts
  StreamKTail tail;

  JobNumbers(std::int64_t jobs, const PartsOfJob& parts, const StreamKTail& tail, unsigned* counter)
      : counter(counter),
        parts(parts),
        before_tail(static_cast<int>(jobs * parts.count()) - tail.jobs),
        tail(tail) {}

  // The number of blocks of the grid.
  unsigned blocks(int multiprocessors) const {
    return static_cast<unsigned>(std::min(std::max(before_tail, tail.blocks), multiprocessors));
  }
  __device__ __forceinline__ int end() const { return before_tail + 2 * tail.blocks; }
  __device__ __forceinline__ int first() const { return or_of_tail(counter ? taken() : blockIdx.x); }
  __device__ __forceinline__ int next(int number) const {
    if (number < before_tail) return or_of_tail(counter ? taken() : number + gridDim.x);
    return which(number) == 1 ? number + 1 : end();
  }
  __device__ __forceinline__ bool in_tail(int number) const { return number >= before_tail; }
  __device__ __forceinline__ StreamKTail::Part part_of_tail(int number) const {
    return tail.part(blockIdx.x, which(number));
  }
  __device__ __forceinline__ JobPart part(int number) const {
    if (in_tail(number)) {
      const int job = part_of_tail(number).job;
      return {tail.first_block(job), tail.last_block(job), static_cast<int>(blockIdx.x)};
    }
    const int count = parts.count(), job = number / count, first = job * (count - 1);
    return count == 1 ? JobPart{} : JobPart{first, first + count - 1, number - job};
  }

 private:
  __device__ __forceinline__ int taken() const { return static_cast<int>(atomicAdd(counter, 1u)); }
  // A block's second part comes first, because another block joins it (stream_k_fixup.cuh).
  __device__ __forceinline__ int which(int number) const { return 1 - (number - before_tail) % 2; }
  // `number` if it is not in the tail; otherwise that of the block's first part there, or end() if it has none.
  __device__ __forceinline__ int or_of_tail(int number) const {
    if (number < before_tail) return number;
    if (static_cast<int>(blockIdx.x) >= tail.blocks) return end();
    return before_tail + 2 * blockIdx.x + (tail.part(blockIdx.x, 1).tiles > 0 ? 0 : 1);
  }
};

// Part `part` of `parts` equal parts of `all`. The first ones may have one more.
struct Share {
  int begin, count;
  __device__ __forceinline__ Share(int all, int part, int parts) {
    const int least = all / parts, rest = all - least * parts;
    begin = part * least + ::min(part, rest), count = least + (part < rest ? 1 : 0);
  }
};

// A tile of columns, with the rows that keep any of these columns, in every query head of the group, or in some.
struct ColumnJob {
  int batch, column_head, column0;
  int first_head, end_head;  // query heads
  int first_tile, tiles;     // row tiles of each head

  // Reduces the job to part `part` of `parts` equal parts of its rows.
  __device__ __forceinline__ void take_part(int part, int parts) {
    const Share own(tiles, part, parts);
    first_tile += own.begin, tiles = own.count;
  }
  // The same of its heads.
  __device__ __forceinline__ void take_heads(int part, int parts) {
    const Share own(end_head - first_head, part, parts);
    first_head += own.begin, end_head = first_head + own.count;
  }
};

template <int kRows, int kColumns>
__device__ __forceinline__ ColumnJob column_job(const FoldShape& shape, int index) {
  const int column_heads = shape.heads / shape.group, all = shape.batch * column_heads;
  const int column_tiles = (shape.columns + kColumns - 1) / kColumns;
  const int section = index / (shape.section * column_tiles), first_head = section * shape.section;
  const int within = index - first_head * column_tiles, heads_here = ::min(shape.section, all - first_head);
  const int rank = within / heads_here, batch_head = first_head + within % heads_here;
  // If a row's last column is bounded (causal), early columns have more rows, and go first.
  const int column0 = rank * kColumns, last_column = ::min(column0 + kColumns, shape.columns) - 1;
  const int begin = ::max(shape.first_row(column0), 0);
  const int end = ::min(shape.end_row(last_column), shape.rows);
  const int first_tile = begin / kRows;
  const int column_head = shape.head_of(batch_head, column_heads);
  return {shape.batch_of(batch_head, column_heads),
          column_head,
          column0,
          column_head * shape.group,
          (column_head + 1) * shape.group,
          first_tile,
          ::max((end + kRows - 1) / kRows - first_tile, 0)};
}
// The job with a number of JobNumbers, or the part of a job.
template <int kRows, int kColumns>
__device__ __forceinline__ ColumnJob column_job(const FoldShape& shape, const JobNumbers& numbers,
                                                int number) {
  if (numbers.in_tail(number)) {
    const StreamKTail::Part part = numbers.part_of_tail(number);
    ColumnJob job = column_job<kRows, kColumns>(shape, numbers.before_tail + part.job);
    job.first_tile += part.first_tile, job.tiles = part.tiles;
    return job;
  }
  const int parts = numbers.parts.count(), index = parts == 1 ? number : number / parts;
  ColumnJob job = column_job<kRows, kColumns>(shape, index);
  if (parts > 1) {
    const int part = number - index * parts, part_of_rows = part / numbers.parts.heads;
    job.take_heads(part - part_of_rows * numbers.parts.heads, numbers.parts.heads);
    job.take_part(part_of_rows, numbers.parts.rows);
  }
  return job;
}

}  // namespace monoidreduce
