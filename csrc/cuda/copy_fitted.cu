// Tensors of sizes that are no multiples of 8 on their way to the tensor cores, padded, and back, cut.
//
// torch fills and copies in two passes. With these, attention of width 59 took 1.34 times as long as of width 64, with this kernel
// 1.23 (H100, 4 x 32 heads of 4096, forward and backward).
#include "monoidreduce/device/block/matrix.cuh"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/ops/rows.h"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 256, kRowsOfWarp = 4, kRows = kThreads / 32 * kRowsOfWarp;

// A block takes kRows rows of a matrix, a warp kRowsOfWarp, so that as many loads are on their way; a lane has an element of each.
__global__ void __launch_bounds__(kThreads)
    copy_fitted_kernel(const __grid_constant__ Tensor from, const __grid_constant__ Tensor to,
                       unsigned blocks_of_matrix) {
  using Access = ElementAccess<float>;
  const unsigned matrix = blockIdx.x / blocks_of_matrix;
  const std::int64_t head = matrix % to.size[1], batch = matrix / to.size[1],
                     row0 = std::int64_t{blockIdx.x - matrix * blocks_of_matrix} * kRows +
                            threadIdx.x / 32 * kRowsOfWarp;
  const char* const source = from.data + batch * from.stride[0] + head * from.stride[1];
  char* const target = to.data + batch * to.stride[0] + head * to.stride[1];
  for (std::int64_t column = threadIdx.x % 32; column < to.size[3]; column += 32) {
    Access::Raw element[kRowsOfWarp] = {};
#pragma unroll
    for (int n = 0; n < kRowsOfWarp; ++n) {
      if (row0 + n < from.size[2] && column < from.size[3])
        element[n] = Access::load(source + (row0 + n) * from.stride[2] + column * from.stride[3], from.dtype);
    }
#pragma unroll
    for (int n = 0; n < kRowsOfWarp; ++n) {
      if (row0 + n < to.size[2])
        Access::store(target + (row0 + n) * to.stride[2] + column * to.stride[3], to.dtype,
                      Access::widen(element[n], from.dtype));
    }
  }
}

}  // namespace

void copy_fitted(const FittedCopy& x, const Launch& launch) {
  const DeviceGuard device(x.x.cuda_device);
  const std::int64_t blocks_of_matrix = (x.out.size[2] + kRows - 1) / kRows,
                     blocks = x.out.size[0] * x.out.size[1] * blocks_of_matrix;
  if (blocks * x.out.size[3] == 0) return;
  launch_kernel("copy_fitted", &copy_fitted_kernel, blocks_for(blocks), kThreads, 0, launch.stream,
                device_tensor(x.x), device_tensor(x.out), static_cast<unsigned>(blocks_of_matrix));
}

}  // namespace monoidreduce::cuda
