// Adds gradients to global memory, atomically or not, for the SIMT kernels.
#pragma once

#include "monoidreduce/device/block/tile.cuh"

namespace monoidreduce {

// to += value. exclusive: no other block adds to this place in this launch, so no atomic is needed and the
// order of the additions is fixed.
template <class T>
__device__ __forceinline__ void accumulate(char* to, T value, bool exclusive) {
  if (exclusive) {
    *reinterpret_cast<T*>(to) += value;
  } else {
    atomicAdd(reinterpret_cast<T*>(to), value);
  }
}

// to[row0 + row i, k0 + column j] += scale * sum[i][j], within the bounds of `to`. T is the element type of
// `to`.
template <class T>
__device__ __forceinline__ void add_tile(const Matrix<T>& to, std::int64_t row0, std::int64_t k0,
                                         const ThreadTile<T>& sum, T scale, bool exclusive) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const std::int64_t row = row0 + product_row(i);
    if (row >= to.rows()) continue;
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) {
      const std::int64_t k = k0 + product_column(j);
      if (k < to.width()) accumulate(to.at(row, k), scale * sum[i][j], exclusive);
    }
  }
}

// to[row0 + r, column0 + c] += tile[c, r]. Where `to` is broadcast over rows or columns, the tile is first
// summed over them. Runs of 8 terms are summed first, so that each of 64 terms takes part in at most 16
// roundings instead of 64.
template <class T>
__device__ __forceinline__ void add_broadcast_tile(const Matrix<T>& to, std::int64_t row0,
                                                   std::int64_t column0, const T* tile, bool exclusive) {
  constexpr int kRun = 8;
  const int rows = static_cast<int>(min(to.rows() - row0, std::int64_t{kTile}));
  const int columns = static_cast<int>(min(to.width() - column0, std::int64_t{kTile}));
  const int sums_down = to.row_stride() == 0 ? 1 : rows, sums_across = to.stride() == 0 ? 1 : columns;
  // The rows and columns that one sum covers.
  const int height = rows / sums_down, width = columns / sums_across;
#pragma unroll 1
  for (int s = threadIdx.x; s < sums_down * sums_across; s += kThreads) {
    const int row = s / sums_across * height, column = s % sums_across * width;
    T sum = T(0);
#pragma unroll 1
    for (int first = 0; first < height * width; first += kRun) {
      T run = T(0);
#pragma unroll 1
      for (int n = first; n < min(first + kRun, height * width); ++n) {
        run += tile[(column + n / height) * kPitch + row + n % height];
      }
      sum += run;
    }
    accumulate(to.at(row0 + row, column0 + column), sum, exclusive);
  }
}

}  // namespace monoidreduce
