// The tile scheduler for few rows (packing.h: PackGQA and split-KV): which rows and columns a block works on.
#pragma once

#include "monoidreduce/device/schedule/packing.h"
#include "monoidreduce/device/schedule/schedule.cuh"

namespace monoidreduce {

// One split of the columns of a tile. The lines of the tile are rows of several heads (PackGQA).
struct PackedJob {
  int batch, head, end_head, row0;  // the heads and the first row of the tile
  int rows;                         // rows of the tile in each head
  int first_tile, tiles;            // column tiles of this split
  int split;

  __device__ __forceinline__ int row_of(int line) const { return row0 + line % rows; }
  __device__ __forceinline__ int head_of(int line) const { return head + line / rows; }
  __device__ __forceinline__ int rows_of(int) const { return rows; }
  __device__ __forceinline__ bool has(const FoldShape& shape, int line) const {
    return row_of(line) < shape.rows && head_of(line) < end_head;
  }
};

template <int kColumns>
struct PackedSchedule {
  using Job = PackedJob;
  const FoldShape& shape;
  const Packing& packing;

  __device__ __forceinline__ int column_heads() const { return shape.heads / shape.group; }
  __device__ __forceinline__ int head_tiles() const {
    return (shape.group + packing.heads - 1) / packing.heads;
  }
  __device__ __forceinline__ int row_tiles() const { return (shape.rows + packing.rows - 1) / packing.rows; }
  __device__ __forceinline__ int jobs() const {
    return shape.batch * column_heads() * packing.splits * head_tiles() * row_tiles();
  }
  __device__ __forceinline__ int lines() const { return packing.heads * packing.rows; }
  __device__ __forceinline__ int next(int index) const { return index + gridDim.x; }
  // Jobs that read the same columns are consecutive.
  __device__ __forceinline__ PackedJob operator()(int index) const {
    const int row_tile = index % row_tiles(), rest = index / row_tiles();
    const int head_tile = rest % head_tiles(), part = rest / head_tiles();
    const int split = part % packing.splits, batch_head = part / packing.splits;
    const int first_head = shape.head_of(batch_head, column_heads()) * shape.group;
    const int head = first_head + head_tile * packing.heads, row0 = row_tile * packing.rows;
    const int last_row = ::min(row0 + packing.rows, shape.rows) - 1;
    const int first_tile = shape.first_column(row0) / kColumns;
    const int end_tile = (shape.end_column(last_row) + kColumns - 1) / kColumns;
    const TileSplit own(::max(end_tile - first_tile, 0), split, packing.splits);
    return {shape.batch_of(batch_head, column_heads()),
            head,
            ::min(head + packing.heads, first_head + shape.group),
            row0,
            packing.rows,
            first_tile + own.begin,
            own.count(),
            split};
  }
};

}  // namespace monoidreduce
