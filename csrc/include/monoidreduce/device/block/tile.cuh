// Tiles of the SIMT kernels. A block of 256 threads works on tiles of 64 x 64. Its threads see a tile in one
// of two ways.
//
// In the product view, thread t has 4 x 4 results of a product: the rows 4 (t / 16) + {0..3} and the columns
// t % 16 + {0, 16, 32, 48}. Operands of a product lie depth-major in shared memory, [depth, 64]. So the four
// rows of a thread are one vector, and neighbouring lanes read neighbouring columns.
//
// In the element view (scores, weights, gradients), a thread has 16 columns of one row. Four neighbouring
// lanes share a row, so that a thread has one state of the monoid, and a row is reduced by two shuffles. A
// tile changes from one view to the other through shared memory, where it lies column-major, [column, row].
#pragma once

#include "monoidreduce/device/block/matrix.cuh"
#include "monoidreduce/math.h"

namespace monoidreduce {

inline constexpr int kTile = 64;
inline constexpr int kThreads = 256;
// Blocks per SM. It limits registers to 128 (float) or 255 (double) per thread.
template <class T>
inline constexpr int kBlocksPerSm = sizeof(T) == sizeof(float) ? 2 : 1;
inline constexpr int kDepth = kTile / 2;  // how much of the depth of two operands is staged at a time
// Distance between lines of 64 elements in shared memory, 4 words more than a multiple of the 32 banks. So a
// warp stages 4 rows of 8 depths, writes a vector of rows for 8 columns, and reads its elements without bank
// conflicts (for float).
inline constexpr int kPitch = kTile + 4;

MR_HD std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The product view.
inline constexpr int kThreadRows = 4, kThreadColumns = 4;
__device__ __forceinline__ int product_row(int i) { return threadIdx.x / 16 * kThreadRows + i; }
__device__ __forceinline__ int product_column(int j) { return threadIdx.x % 16 + j * 16; }
template <class T>
using ThreadTile = T[kThreadRows][kThreadColumns];

// The element view.
inline constexpr int kRowLanes = 4;
inline constexpr int kLaneElements = kTile / kRowLanes;
__device__ __forceinline__ int element_row() { return threadIdx.x / kRowLanes; }
__device__ __forceinline__ int element_column(int n) {
  return n / 2 * 2 * kRowLanes + threadIdx.x % kRowLanes * 2 + n % 2;
}

// The shared memory that every SIMT kernel has.
template <class T>
struct TileMemory {
  alignas(32) T first[kTile * kPitch];   // a tile
  alignas(32) T second[kTile * kPitch];  // a tile; or what is staged for a product: two operands of kDepth,
                                         // or one of kTile
  std::uint64_t valid[kTile];            // for each row, one bit per column (Validity)
  T row_value[kTile];                    // what the element view passes to the product view about a row
};

// staged[k, i] = m[row0 + i, k0 + k] for 64 rows and kDepth columns of m; 0 outside m, where nothing is read.
template <class T, bool kTransposed>
__device__ __forceinline__ void stage(T* staged, const Matrix<T, kTransposed>& m, std::int64_t row0,
                                      std::int64_t k0) {
  using Access = ElementAccess<T>;
  using Raw = typename Access::Raw;
  constexpr int kSteps = kDepth * kTile / kThreads;
  const int rows = static_cast<int>(min(m.rows() - row0, std::int64_t{kTile}));
  const int depth = static_cast<int>(min(m.width() - k0, std::int64_t{kDepth}));
  // A warp reads 8 elements along k of 4 rows, or 32 along the rows, whichever are closer together in memory.
  const bool along_k = m.stride() <= m.row_stride();
  const int i = along_k ? threadIdx.x / 8 : threadIdx.x % kTile;
  const int k = along_k ? threadIdx.x % 8 : threadIdx.x / kTile;
  const auto row_step = [&](int step) { return along_k ? kThreads / 8 * (step % 2) : 0; };
  const auto depth_step = [&](int step) { return along_k ? 8 * (step / 2) : kThreads / kTile * step; };
  const char* const from = m.at(row0 + i, k0 + k);
  Raw raw[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int di = row_step(step), dk = depth_step(step);
    const bool inside = i + di < rows && k + dk < depth;
    raw[step] = inside ? Access::load(from + di * m.row_stride() + dk * m.stride(), m.tensor.dtype) : Raw{};
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    staged[(k + depth_step(step)) * kPitch + i + row_step(step)] = Access::widen(raw[step], m.tensor.dtype);
  }
}

// Which of the 64 x 64 terms of a product take part. Where an element of the tile is not valid (masked), the
// tile holds 0. The other factor is then skipped, because it may be NaN.
struct AllTerms {
  __device__ bool operator()(int, int) const { return true; }
};
struct ValidTerms {
  const std::uint64_t* valid;  // TileMemory::valid
  // True: k is a row of the tile of elements and i a column; false: the other way round.
  bool along_rows;
  __device__ bool operator()(int k, int i) const {
    return valid[along_rows ? k : i] >> (along_rows ? i : k) & 1;
  }
};

// sum[i][j] += sum over k < kCount of left[k, row i] right[k, column j], for the terms (k, row i) that take
// part.
template <int kCount, class T, class Terms>
__device__ __forceinline__ void multiply(ThreadTile<T>& sum, const T* left, const T* right,
                                         const Terms& terms) {
#pragma unroll 4
  for (int k = 0; k < kCount; ++k) {
    T l[kThreadRows], r[kThreadColumns];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) l[i] = left[k * kPitch + product_row(i)];
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) r[j] = right[k * kPitch + product_column(j)];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const bool take = terms(k, product_row(i));
#pragma unroll
      for (int j = 0; j < kThreadColumns; ++j) sum[i][j] += l[i] * (take ? r[j] : T(0));
    }
  }
}

template <class T>
__device__ __forceinline__ void clear(ThreadTile<T>& tile) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) tile[i][j] = T(0);
}

// Move a tile from the product view to shared memory, and back.
template <class T>
__device__ __forceinline__ void put_tile(T* tile, const ThreadTile<T>& value) {
#pragma unroll
  for (int j = 0; j < kThreadColumns; ++j)
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) tile[product_column(j) * kPitch + product_row(i)] = value[i][j];
}
template <class T>
__device__ __forceinline__ void get_tile(ThreadTile<T>& value, const T* tile) {
#pragma unroll
  for (int j = 0; j < kThreadColumns; ++j)
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) value[i][j] = tile[product_column(j) * kPitch + product_row(i)];
}

// Transposes a tile in shared memory: [column, row] becomes [row, column]. Starts with a barrier, ends
// without one.
template <class T>
__device__ __forceinline__ void transpose_tile(T* tile) {
  ThreadTile<T> value;
  __syncthreads();
  get_tile(value, tile);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) tile[product_row(i) * kPitch + product_column(j)] = value[i][j];
}

// into[column j, row i] = <a row i, b row j>, for 64 rows of each. Stages operands in memory.second, which
// `into` may be. When it is called memory.second must no longer be in use. Ends without a barrier.
//
// kByStages: the terms of each stage are summed by themselves, so that a chain has kDepth terms, and one addition for each stage. (In
// one sum of 264 terms scores of standard deviation 16 had three times the error of torch's product of one row, which splits its
// sums.) Kernels with a payload lack the registers: attention's forward pass would spill 56 bytes.
template <bool kByStages, class T>
__device__ __forceinline__ void multiply_rows(T* into, TileMemory<T>& memory, const Matrix<T>& a,
                                              std::int64_t a_row, const Matrix<T>& b, std::int64_t b_row) {
  ThreadTile<T> dot;
  clear<T>(dot);
  T* const right = memory.second + kDepth * kPitch;
#pragma unroll 1
  for (std::int64_t k = 0; k < a.width(); k += kDepth) {
    stage(memory.second, a, a_row, k);
    stage(right, b, b_row, k);
    __syncthreads();
    if constexpr (kByStages) {
      ThreadTile<T> of_stage;
      clear<T>(of_stage);
      multiply<kDepth>(of_stage, memory.second, right, AllTerms{});
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int j = 0; j < kThreadColumns; ++j) dot[i][j] += of_stage[i][j];
    } else {
      multiply<kDepth>(dot, memory.second, right, AllTerms{});
    }
    __syncthreads();
  }
  put_tile(into, dot);
}

// sum[i][j] += sum over 64 k of memory.first[k, row i] m[m_column + column j, m_row + k], where m is a
// transposed matrix. full: every element of the tile takes part; otherwise see ValidTerms. When it is called
// memory.second must no longer be in use. Ends with a barrier.
template <class T>
__device__ __forceinline__ void multiply_tile(ThreadTile<T>& sum, TileMemory<T>& memory, bool along_rows,
                                              bool full, const Matrix<T, true>& m, std::int64_t m_row,
                                              std::int64_t m_column) {
#pragma unroll 1
  for (int k = 0; k < kTile; k += kDepth) stage(memory.second + k * kPitch, m, m_column, m_row + k);
  __syncthreads();
  if (full) {
    multiply<kTile>(sum, memory.first, memory.second, AllTerms{});
  } else {
    multiply<kTile>(sum, memory.first, memory.second, ValidTerms{memory.valid, along_rows});
  }
  __syncthreads();
}

}  // namespace monoidreduce
