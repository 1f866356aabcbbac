// What attention's backward needs of each row beside its log-sum-exp: centre_i = g_i - <G_i, out_i>, where g is the gradient by
// the log-sum-exp and G the one by the output. It is the part of D that is the same for every element of the row.
#pragma once

#include "monoidreduce/block/matrix.cuh"
#include "monoidreduce/kernel/launch.cuh"
#include "monoidreduce/operators.h"
#include "monoidreduce/warp/lanes.cuh"

namespace monoidreduce {
namespace simt {

inline constexpr int kRowsOfBlock = 8;  // a warp a row

template <class T>
__global__ void row_centre(TensorView grad_out, TensorView out, TensorView grad_lse, TensorView centre) {
  const std::int64_t heads = centre.size[1], rows = centre.size[2], all_rows = centre.size[0] * heads * rows;
  const std::int64_t step = std::int64_t{gridDim.x} * kRowsOfBlock;
  for (std::int64_t flat = std::int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / 32; flat < all_rows; flat += step) {
    const std::int64_t row = flat % rows, head = flat / rows % heads, batch = flat / rows / heads;
    T dot = T(0);
    if (grad_out.rank) {
      const auto g = matrix_of<T>(grad_out, batch, head), y = matrix_of<T>(out, batch, head);
#pragma unroll 1
      for (std::int64_t k = threadIdx.x % 32; k < g.width; k += 32) dot += g.read(row, k) * y.read(row, k);
    }
    dot = reduce_lanes<32>(dot, [](T a, T b) { return a + b; });
    if (threadIdx.x % 32 != 0) continue;
    T g_lse = T(0);
    if (grad_lse.rank) {
      g_lse = static_cast<const T*>(
          grad_lse.data)[batch * grad_lse.stride[0] + head * grad_lse.stride[1] + row * grad_lse.stride[2]];
    }
    static_cast<T*>(centre.data)[flat] = g_lse - dot;
  }
}

}  // namespace simt

// grad_out, out [B, H, M, D] and grad_lse [B, H, M] of any strides, the two gradients each possibly absent; centre [B, H, M]
// contiguous, of type T.
template <class T>
void row_centre(const TensorView& grad_out, const TensorView& out, const TensorView& grad_lse, const TensorView& centre,
                const Launch& launch) {
  if (centre.numel() == 0) return;
  const DeviceGuard device(centre.cuda_device);
  launch_kernel("row_centre", &simt::row_centre<T>, blocks_for((centre.numel() + simt::kRowsOfBlock - 1) / simt::kRowsOfBlock),
                32 * simt::kRowsOfBlock, 0, launch.stream, grad_out, out, grad_lse, centre);
}

}  // namespace monoidreduce
