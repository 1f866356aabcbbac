// Tensors of sizes that are no multiples of 8 on their way to the tensor cores, padded, and back, cut.
//
// torch fills and copies in two passes. With these, attention of width 59 took 1.34 times as long as of width 64 (H100, 4 x 32
// heads of 4096, forward and backward).
#include "element.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/ops/rows.h"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 256, kRowsOfWarp = 8, kRows = kThreads / 32 * kRowsOfWarp;
constexpr int kColumnsOfLane = 2;

// A block takes kRows rows of a matrix, a warp kRowsOfWarp. A lane has kColumnsOfLane elements of each, 32 columns apart: all its
// loads are on their way before the first store.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    copy_fitted_kernel(const __grid_constant__ Tensor from, const __grid_constant__ Tensor to,
                       unsigned blocks_of_matrix) {
  const unsigned matrix = blockIdx.x / blocks_of_matrix;
  const std::int64_t head = matrix % to.size[1], batch = matrix / to.size[1],
                     row0 = std::int64_t{blockIdx.x - matrix * blocks_of_matrix} * kRows +
                            threadIdx.x / 32 * kRowsOfWarp;
  const char* const source =
      from.data + batch * from.stride[0] + head * from.stride[1] + row0 * from.stride[2];
  char* const target = to.data + batch * to.stride[0] + head * to.stride[1] + row0 * to.stride[2];
  for (std::int64_t column0 = threadIdx.x % 32; column0 < to.size[3]; column0 += 32 * kColumnsOfLane) {
    From element[kRowsOfWarp][kColumnsOfLane];
#pragma unroll
    for (int n = 0; n < kRowsOfWarp; ++n)
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) {
        const std::int64_t column = column0 + 32 * c;
        element[n][c] = From(0.f);
        if (row0 + n < from.size[2] && column < from.size[3])
          element[n][c] =
              *reinterpret_cast<const From*>(source + n * from.stride[2] + column * from.stride[3]);
      }
#pragma unroll
    for (int n = 0; n < kRowsOfWarp; ++n)
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) {
        const std::int64_t column = column0 + 32 * c;
        if (row0 + n < to.size[2] && column < to.size[3])
          *reinterpret_cast<To*>(target + n * to.stride[2] + column * to.stride[3]) =
              static_cast<To>(static_cast<float>(element[n][c]));
      }
  }
}

}  // namespace

void copy_fitted(const FittedCopy& x, const Launch& launch) {
  const DeviceGuard device(x.x.cuda_device);
  const std::int64_t blocks_of_matrix = (x.out.size[2] + kRows - 1) / kRows,
                     blocks = x.out.size[0] * x.out.size[1] * blocks_of_matrix;
  if (blocks * x.out.size[3] == 0) return;
  HalvesAndFloat::with(x.x.dtype, [&](auto from) {
    HalvesAndFloat::with(x.out.dtype, [&](auto to) {
      launch_kernel("copy_fitted", &copy_fitted_kernel<decltype(from), decltype(to)>, blocks_for(blocks),
                    kThreads, 0, launch.stream, device_tensor(x.x), device_tensor(x.out),
                    static_cast<unsigned>(blocks_of_matrix));
    });
  });
}

}  // namespace monoidreduce::cuda
