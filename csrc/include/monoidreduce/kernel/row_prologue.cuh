// What attention's backward needs of each row beside its log-sum-exp: centre_i = g_i - <G_i, out_i>, where g
// is the gradient by the log-sum-exp and G the one by the output. It is the part of D that is the same for
// every element of the row.
#pragma once

#include "monoidreduce/block/matrix.cuh"
#include "monoidreduce/kernel/launch.cuh"
#include "monoidreduce/operators.h"
#include "monoidreduce/warp/lanes.cuh"

namespace monoidreduce {
namespace simt {

inline constexpr int kRowsOfBlock = 8;  // a warp a row

template <class T>
__global__ void row_centre(const __grid_constant__ Tensor grad_out, const __grid_constant__ Tensor out,
                           const __grid_constant__ Tensor grad_lse, const __grid_constant__ Tensor centre) {
  const std::int64_t heads = centre.size[1], rows = centre.size[2], all_rows = centre.size[0] * heads * rows;
  const std::int64_t step = std::int64_t{gridDim.x} * kRowsOfBlock;
  for (std::int64_t flat = std::int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / 32; flat < all_rows;
       flat += step) {
    const std::int64_t row = flat % rows, head = flat / rows % heads, batch = flat / rows / heads;
    T dot = T(0);
    if (grad_out.data) {
      const Matrix<T> g(grad_out, batch, head), y(out, batch, head);
#pragma unroll 1
      for (std::int64_t k = threadIdx.x % 32; k < g.width(); k += 32) dot += g.read(row, k) * y.read(row, k);
    }
    dot = reduce_lanes<32>(dot, [](T a, T b) { return a + b; });
    if (threadIdx.x % 32 != 0) continue;
    const T of_lse = grad_lse.data ? Matrix<T>(grad_lse, batch, head).read(row, 0) : T(0);
    Matrix<T>(centre, batch, head).write(row, 0, of_lse - dot);
  }
}

}  // namespace simt

// grad_out, out [B, H, M, D] and grad_lse [B, H, M] of any strides, the two gradients each possibly absent;
// centre [B, H, M]. The last two are of type T.
template <class T>
void row_centre(const TensorView& grad_out, const TensorView& out, const TensorView& grad_lse,
                const TensorView& centre, const Launch& launch) {
  const std::int64_t rows = centre.numel();
  if (rows == 0) return;
  const auto as_column = [](TensorView t) {  // [B, H, M, 1]
    if (t.present()) t.rank = 4, t.size[3] = 1, t.stride[3] = 0;
    return Tensor(t);
  };
  const DeviceGuard device(centre.cuda_device);
  launch_kernel("row_centre", &simt::row_centre<T>,
                blocks_for((rows + simt::kRowsOfBlock - 1) / simt::kRowsOfBlock), 32 * simt::kRowsOfBlock, 0,
                launch.stream, Tensor(grad_out), Tensor(out), as_column(grad_lse), as_column(centre));
}

}  // namespace monoidreduce
