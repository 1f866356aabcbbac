// Backward preprocess of attention on any GPU. For each row it computes
//
//   g_i                               the upstream gradient of the log-sum-exp (grad_lse)
//   centre_i = g_i - <G_i, out_i>     grad_lse - delta, where G is the upstream gradient of the output
//
// They are the part of D that is the same for every element of a row.
#pragma once

#include "monoidreduce/device/block/matrix.cuh"
#include "monoidreduce/device/warp/lanes.cuh"

namespace monoidreduce {
namespace simt {

inline constexpr int kRowsOfBlock = 8;  // one warp per row

// grad_out, out, out_low: [B, H, M, D]; grad_lse: [B, H, M]; of_lse (g_i) and centre: [B, H, M], contiguous.
// Absent inputs count as 0. grad_out may be padded with more columns than out has.
template <class T>
__global__ void row_centre(const __grid_constant__ Tensor grad_out, const __grid_constant__ Tensor out,
                           const __grid_constant__ Tensor out_low, const __grid_constant__ Tensor grad_lse,
                           T* of_lse, T* centre) {
  const std::int64_t heads = out.size[1], rows = out.size[2], all_rows = out.size[0] * heads * rows;
  const std::int64_t step = std::int64_t{gridDim.x} * kRowsOfBlock;
  for (std::int64_t flat = std::int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / 32; flat < all_rows;
       flat += step) {
    const std::int64_t row = flat % rows, head = flat / rows % heads, batch = flat / rows / heads;
    T dot = T(0);
    if (grad_out.data) {
      const Matrix<T> g(grad_out, batch, head), y(out, batch, head), low(out_low, batch, head);
#pragma unroll 1
      for (std::int64_t k = threadIdx.x % 32; k < y.width(); k += 32)
        dot += g.read(row, k) * (y.read(row, k) + (out_low.data ? low.read(row, k) : T(0)));
    }
    dot = reduce_lanes<32>(dot, [](T a, T b) { return a + b; });
    if (threadIdx.x % 32 != 0) continue;
    const T g = grad_lse.data ? Matrix<T>(grad_lse, batch, head).read(row, 0) : T(0);
    of_lse[flat] = g, centre[flat] = g - dot;
  }
}

}  // namespace simt

}  // namespace monoidreduce
