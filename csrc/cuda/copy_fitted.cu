// Copies tensors whose sizes are not multiples of 8 into padded ones for the tensor cores, and cuts results
// back.
//
// torch fills and copies in two passes. With these, attention of width 59 took 1.34 times as long as of width
// 64 (H100, 4 x 32 heads of 4096, forward and backward).
#include <type_traits>

#include "element.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/ops/rows.h"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 256, kRowsOfWarp = 8, kRows = kThreads / 32 * kRowsOfWarp;
constexpr int kColumnsOfLane = 2;

// How many of the warp's rows exist, from row0 on.
__device__ __forceinline__ int rows_left(const Tensor& t, std::int64_t row0) {
  return static_cast<int>(min(std::int64_t{kRowsOfWarp}, t.size[2] - row0));
}

// from: [batch, heads, rows, columns]; to: the same but for the last two sizes. A block takes kRows rows of a
// matrix, a warp kRowsOfWarp. A lane has kColumnsOfLane elements of each row, 32 columns apart: all its loads
// are in flight before the first store. kDense: the elements of a row of the source are adjacent. Then 4 x 32
// x 4096 rows of 59 take as long as cudaMemcpy of 64 (50 us on an H100).
template <class From, class To, bool kDense>
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
  const std::int64_t step = kDense ? std::int64_t{sizeof(From)} : from.stride[3];
  const int rows_of_source = rows_left(from, row0), rows_of_target = rows_left(to, row0),
            columns_of_source = static_cast<int>(from.size[3]), columns = static_cast<int>(to.size[3]);
  for (int column0 = threadIdx.x % 32; column0 < columns; column0 += 32 * kColumnsOfLane) {
    From element[kRowsOfWarp][kColumnsOfLane];
#pragma unroll
    for (int n = 0; n < kRowsOfWarp; ++n)
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) {
        const int column = column0 + 32 * c;
        element[n][c] = From(0.f);
        if (n < rows_of_source && column < columns_of_source)
          element[n][c] = *reinterpret_cast<const From*>(source + n * from.stride[2] + column * step);
      }
#pragma unroll
    for (int n = 0; n < kRowsOfWarp; ++n)
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) {
        const int column = column0 + 32 * c;
        if (n < rows_of_target && column < columns)
          *reinterpret_cast<To*>(target + n * to.stride[2] + column * to.stride[3]) =
              static_cast<To>(static_cast<float>(element[n][c]));
      }
  }
}

}  // namespace

template <>
void run(const FittedCopy& x, const Launch& launch) {
  const DeviceGuard device(x.x.cuda_device);
  const std::int64_t blocks_of_matrix = (x.out.size[2] + kRows - 1) / kRows,
                     blocks = x.out.size[0] * x.out.size[1] * blocks_of_matrix;
  if (blocks * x.out.size[3] == 0) return;
  HalvesAndFloat::with(x.x.dtype, [&](auto from) {
    HalvesAndFloat::with(x.out.dtype, [&](auto to) {
      const auto copy = [&](auto dense) {
        launch_kernel("copy_fitted",
                      &copy_fitted_kernel<decltype(from), decltype(to), decltype(dense)::value>,
                      blocks_for(blocks), kThreads, 0, launch.stream, device_tensor(x.x),
                      device_tensor(x.out), static_cast<unsigned>(blocks_of_matrix));
      };
      x.x.stride[3] == 1 ? copy(std::true_type{}) : copy(std::false_type{});
    });
  });
}

}  // namespace monoidreduce::cuda
