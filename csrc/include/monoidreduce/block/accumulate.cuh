// Gradients into global memory: the only place that issues atomics.
#pragma once

#include "monoidreduce/block/tile.cuh"

namespace monoidreduce {

// A gradient of [rows, width], in the accumulation type; strides in elements.
template <class T>
struct Accumulator {
  T* data;
  std::int64_t rows, width;
  std::int64_t row_stride, stride;

  // exclusive: no other block adds to this place in this launch, so the order of additions is that of the calling block.
  __device__ void add(std::int64_t row, std::int64_t k, T value, bool exclusive) const {
    T* const to = data + row * row_stride + k * stride;
    if (exclusive) {
      *to += value;
    } else {
      atomicAdd(to, value);
    }
  }
};

// Of one batch and head of a [batch, heads, rows, width] tensor.
template <class T>
__device__ Accumulator<T> accumulator_of(const TensorView& t, std::int64_t batch, std::int64_t head) {
  return {static_cast<T*>(t.data) + batch * t.stride[0] + head * t.stride[1], t.size[2], t.size[3], t.stride[2], t.stride[3]};
}

// to[row0 + row i, k0 + column j] += scale sum[i][j], within the bounds of to.
template <class T>
__device__ __forceinline__ void add_tile(const Accumulator<T>& to, std::int64_t row0, std::int64_t k0, const ThreadTile<T>& sum, T scale,
                                         bool exclusive) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const std::int64_t row = row0 + product_row(i);
    if (row >= to.rows) continue;
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) {
      const std::int64_t k = k0 + product_column(j);
      if (k < to.width) to.add(row, k, scale * sum[i][j], exclusive);
    }
  }
}

// to[row0 + r, column0 + c] += tile[c, r], summed over rows or columns first where to is broadcast over them.
template <class T>
__device__ __forceinline__ void add_broadcast_tile(const Accumulator<T>& to, std::int64_t row0, std::int64_t column0, const T* tile,
                                                   bool exclusive) {
  const int rows = static_cast<int>(min(to.rows - row0, std::int64_t{kTile}));
  const int columns = static_cast<int>(min(to.width - column0, std::int64_t{kTile}));
  const int sums_down = to.row_stride == 0 ? 1 : rows, sums_across = to.stride == 0 ? 1 : columns;
  const int height = rows / sums_down, width = columns / sums_across;  // of what is summed
#pragma unroll 1
  for (int s = threadIdx.x; s < sums_down * sums_across; s += kThreads) {
    const int row = s / sums_across * height, column = s % sums_across * width;
    T sum = T(0);
#pragma unroll 1
    for (int r = row; r < row + height; ++r) {
#pragma unroll 1
      for (int c = column; c < column + width; ++c) sum += tile[c * kPitch + r];
    }
    to.add(row0 + row, column0 + column, sum, exclusive);
  }
}

}  // namespace monoidreduce
