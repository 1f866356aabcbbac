// Backward preprocess of attention. For each row it stores, in the form that the backward kernel loads:
//
//   the log-sum-exp, in base 2
//   the centre (delta) g_i - <G_i, out_i>, times the scale of the scores
//
// g is the upstream gradient of the log-sum-exp, G that of the output. The kernel also clears the marks of repair.cuh, and
// the counters and semaphores of the backward kernel.
#pragma once

#include <cmath>
#include <cstdint>

#include "monoidreduce/device/arch/mma.cuh"
#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// The result of prepare_rows for each row: P_i, and RowPolicy::upstream times the unit of the scores.
struct RowResiduals {
  float *product, *upstream;  // [batch, heads, padded_rows]
  int padded_rows;  // rows, rounded up to a multiple of 128; the rows beyond the last one weigh nothing
};

// A mark for every 64 rows of a head and every 64 columns of a column head. A mark that is not 0 means that their
// gradients must be computed again (repair.cuh).
struct RowMarks {
  static constexpr int kUnit = 64;
  float *rows, *columns;
  int row_units, column_units;  // of a head

  __device__ __forceinline__ float& row(std::int64_t head, std::int64_t row) const {
    return rows[head * row_units + row / kUnit];
  }
  __device__ __forceinline__ float& column(std::int64_t head, std::int64_t column) const {
    return columns[head * column_units + column / kUnit];
  }
};

// Words that are set to 0.
struct ClearedWords {
  unsigned* words;
  std::int64_t count;
};

struct RowInputs {
  // [B, H, M, D], lines on 16-byte boundaries; [B, H, M, at most D] twice, out_low possibly absent; [B, H, M] twice, the last
  // possibly absent
  TensorView grad_out, out, out_low, lse, grad_lse;
  float scale;
  std::int64_t column_heads;
  bool banded;  // some rows do not keep every column; only then are columns marked
};

inline constexpr int kChunk = 8;  // 16-bit elements that a lane reads at once
inline constexpr int kPrepareThreads = 256;

// kChunk elements of type E from 16-byte boundaries on.
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

// The same of a row of any width, from any address on: 0 beyond its end.
template <class E>
__device__ __forceinline__ void load_chunk(float (&to)[kChunk], const E* row, int first, int width) {
  const E* const from = row + first;
  if (first + kChunk <= width && reinterpret_cast<std::uint64_t>(from) % sizeof(uint4) == 0)
    return load_chunk<E>(to, from);
#pragma unroll
  for (int k = 0; k < kChunk; ++k) to[k] = first + k < width ? float(from[k]) : 0.f;
}

// x rounded as an operand of type E: in a row with one column, <G_i, v_j> and <G_i, out_i> must cancel exactly.
template <class E>
__device__ __forceinline__ float as_factor(float x) {
  if constexpr (std::is_same_v<E, float>) x = __uint_as_float(arch::round_to_tf32(x));
  return x;
}

// kLanes lanes per row, each with kChunk elements. A block takes consecutive rows of one head.
template <class E, int kLanes>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_rows(const __grid_constant__ RowInputs x, const __grid_constant__ RowResiduals to,
                 const __grid_constant__ RowMarks marks, const __grid_constant__ ClearedWords cleared) {
  constexpr int kRows = kPrepareThreads / kLanes;
  const int heads = static_cast<int>(x.out.size[1]), rows = static_cast<int>(x.out.size[2]),
            width = static_cast<int>(x.out.size[3]), blocks_of_head = to.padded_rows / kRows;
  const int batch_head = blockIdx.x / blocks_of_head, batch = batch_head / heads, head = batch_head % heads;
  const int row = (blockIdx.x - batch_head * blocks_of_head) * kRows + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  for (std::int64_t n = std::int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x; n < cleared.count;
       n += std::int64_t{gridDim.x} * kPrepareThreads)
    cleared.words[n] = 0;
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
  float product = INFINITY, upstream = 0.f;  // the weights of rows beyond the last and without columns are 0
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
  if (row % RowMarks::kUnit == 0) marks.row(batch_head, row) = 0.f;
}

// The marks of the columns.
static __global__ void clear_marks(float* marks, std::int64_t count) {
  const std::int64_t n = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (n < count) marks[n] = 0.f;
}

}  // namespace monoidreduce
