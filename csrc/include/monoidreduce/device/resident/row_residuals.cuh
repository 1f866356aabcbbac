// Backward preprocess of attention. For each row it stores, in the form in which the backward kernel loads
// them:
//
//   the log-sum-exp, in base 2
//   the centre: grad_lse - delta, where delta = <grad_out, out>, the row's sum of dO * O; times the scale of the scores
//
// The kernel also clears what the backward kernel adds to: the gradient of the rows, the marks of repair.cuh, and
// counters and semaphores.
#pragma once

#include <cmath>
#include <cstdint>

#include "monoidreduce/device/arch/mma.cuh"
#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// What prepare_rows stores for each row: P_i (the log-sum-exp), and RowPolicy::upstream (the centre) times
// the unit of the scores.
struct RowResiduals {
  float *product, *upstream;  // [batch, heads, padded_rows]
  // The number of rows, rounded up to a multiple of 128; rows beyond the last have weights of 0.
  int padded_rows;
};

// One mark for every 64 rows of a head, and for every 64 columns of a column head. Where a mark is not 0,
// their gradients must be computed again (repair.cuh).
struct RowMarks {
  static constexpr int kUnit = 64;
  float *rows, *columns;
  int row_units, column_units;  // of each head

  __device__ __forceinline__ float& row(std::int64_t head, std::int64_t row) const {
    return rows[head * row_units + row / kUnit];
  }
  __device__ __forceinline__ float& column(std::int64_t head, std::int64_t column) const {
    return columns[head * column_units + column / kUnit];
  }
};

// Memory that prepare_rows sets to 0.
struct Cleared {
  RowMarks marks;
  std::int64_t column_marks;  // the number of marks of columns
  unsigned* words;            // counters and semaphores
  std::int64_t word_count;
  // [rows of all heads, d_a_width], 16-byte aligned, d_a_width a multiple of 4. Null: the backward kernel does
  // not add to it.
  float* d_a;
  int d_a_width;
};

struct RowInputs {
  // grad_out: [B, H, M, D], lines on 16-byte boundaries. out and out_low: [B, H, M, at most D]; out_low may
  // be absent. lse and grad_lse: [B, H, M]; grad_lse may be absent.
  TensorView grad_out, out, out_low, lse, grad_lse;
  float scale;
};

inline constexpr int kChunk = 8;  // 16-bit elements that a lane reads at a time
inline constexpr int kPrepareThreads = 256;

// Loads kChunk elements of type E from a 16-byte boundary.
template <class E>
__device__ __forceinline__ void load_chunk(float (&to)[kChunk], const void* from) {
  union {
    uint4 words[kChunk * sizeof(E) / sizeof(uint4)];
    E elements[kChunk];
  } chunk;
#pragma unroll
  for (int w = 0; w < int(kChunk * sizeof(E) / sizeof(uint4)); ++w)
    chunk.words[w] = static_cast<const uint4*>(from)[w];
#pragma unroll
  for (int k = 0; k < kChunk; ++k) to[k] = float(chunk.elements[k]);
}

// The same from any address in a row of any width; elements beyond its end are 0.
template <class E>
__device__ __forceinline__ void load_chunk(float (&to)[kChunk], const E* row, int first, int width) {
  const E* const from = row + first;
  if (first + kChunk <= width && reinterpret_cast<std::uint64_t>(from) % sizeof(uint4) == 0)
    return load_chunk<E>(to, from);
#pragma unroll
  for (int k = 0; k < kChunk; ++k) to[k] = first + k < width ? float(from[k]) : 0.f;
}

// x as matrix products see it, rounded to tf32 if E is float: in a row with one column, <G_i, v_j> and <G_i,
// out_i> must cancel exactly.
template <class E>
__device__ __forceinline__ float as_factor(float x) {
  if constexpr (std::is_same_v<E, float>) x = __uint_as_float(arch::round_to_tf32(x));
  return x;
}

// kLanes lanes take one row, each with kChunk elements of it. A block takes consecutive rows of one head.
template <class E, int kLanes>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_rows(const __grid_constant__ RowInputs x, const __grid_constant__ RowResiduals to,
                 const __grid_constant__ Cleared cleared) {
  constexpr int kRows = kPrepareThreads / kLanes;
  const int heads = static_cast<int>(x.out.size[1]), rows = static_cast<int>(x.out.size[2]),
            width = static_cast<int>(x.out.size[3]), blocks_of_head = to.padded_rows / kRows;
  const int batch_head = blockIdx.x / blocks_of_head, batch = batch_head / heads, head = batch_head % heads;
  const int row = (blockIdx.x - batch_head * blocks_of_head) * kRows + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x,
                     threads = std::int64_t{gridDim.x} * kPrepareThreads;
  for (std::int64_t n = thread; n < cleared.word_count; n += threads) cleared.words[n] = 0;
  for (std::int64_t n = thread; n < cleared.column_marks; n += threads) cleared.marks.columns[n] = 0.f;
  if (cleared.d_a && row < rows) {
    float* const d_a = cleared.d_a + (std::int64_t{batch_head} * rows + row) * cleared.d_a_width;
    for (int k = 4 * lane; k < cleared.d_a_width; k += 4 * kLanes)
      *reinterpret_cast<float4*>(d_a + k) = {0.f, 0.f, 0.f, 0.f};
  }
  const auto offset = [&](const TensorView& t) {
    return batch * t.stride[0] + head * t.stride[1] + row * t.stride[2];
  };
  float dot = 0.f;
  if (row < rows && lane * kChunk < width) {
    float g[kChunk], y[kChunk];
    load_chunk<E>(g, static_cast<const E*>(x.grad_out.data) + offset(x.grad_out) + lane * kChunk);
    load_chunk(y, static_cast<const E*>(x.out.data) + offset(x.out), lane * kChunk, width);
    if (x.out_low.data) {
      float low[kChunk];
      load_chunk(low, static_cast<const E*>(x.out_low.data) + offset(x.out_low), lane * kChunk, width);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) y[k] += low[k];
    }
#pragma unroll
    for (int k = 0; k < kChunk; ++k) dot += as_factor<E>(g[k]) * y[k];
  }
  dot = reduce_lanes<kLanes>(dot, [](float a, float b) { return a + b; });
  if (lane != 0) return;
  // Rows beyond the last one and rows without columns have weights (p) of 0.
  float product = INFINITY, upstream = 0.f;
  if (row < rows) {
    const float lse = static_cast<const float*>(x.lse.data)[offset(x.lse)];
    const float of_lse =
        x.grad_lse.data ? static_cast<const float*>(x.grad_lse.data)[offset(x.grad_lse)] : 0.f;
    const float centre = of_lse - dot;
    if (lse != -INFINITY) product = softmax_product(lse, centre) * float(kLog2E), upstream = centre * x.scale;
  }
  const std::int64_t flat = std::int64_t{batch_head} * to.padded_rows + row;
  to.product[flat] = product;
  to.upstream[flat] = upstream;
  if (row % RowMarks::kUnit == 0) cleared.marks.row(batch_head, row) = 0.f;
}

}  // namespace monoidreduce
