#include "monoidreduce/kernel/launch.cuh"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

// The sum of the values of the block's threads before the calling one, and of all.
struct Scan {
  std::int64_t before, all;
};
__device__ __forceinline__ std::int64_t scan_warp(std::int64_t value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::int64_t other = __shfl_up_sync(0xffffffffu, value, step);
    if (threadIdx.x % 32 >= step) value += other;
  }
  return value;
}
__device__ __forceinline__ Scan scan_block(std::int64_t value) {
  __shared__ std::int64_t of_warps[kWarps];
  const std::int64_t in_warp = scan_warp(value);
  if (threadIdx.x % 32 == 31) of_warps[threadIdx.x / 32] = in_warp;
  __syncthreads();
  static_assert(kWarps == 32);
  if (threadIdx.x < 32) of_warps[threadIdx.x] = scan_warp(of_warps[threadIdx.x]);
  __syncthreads();
  const int warp = threadIdx.x / 32;
  return {(warp == 0 ? 0 : of_warps[warp - 1]) + in_warp - value, of_warps[kWarps - 1]};
}

// One block: a thread has neighbouring rows, which it counts and then places.
__global__ void __launch_bounds__(kThreads)
    order_rows_kernel(std::int64_t rows, const CountedTokens counted, std::int64_t* order) {
  const std::int64_t of_thread = (rows + kThreads - 1) / kThreads;
  const std::int64_t first = ::min(threadIdx.x * of_thread, rows), end = ::min(first + of_thread, rows);
  std::int64_t count = 0;
  for (std::int64_t row = first; row < end; ++row) count += counted(row);
  const Scan scan = scan_block(count);
  std::int64_t place = scan.before, place_of_others = scan.all + first - scan.before;
  for (std::int64_t row = first; row < end; ++row) order[counted(row) ? place++ : place_of_others++] = row;
  if (threadIdx.x == 0) order[rows] = scan.all;
}

}  // namespace

void order_rows(const RowOrdering& x, const Launch& launch) {
  const DeviceGuard device(x.order.cuda_device);
  launch_kernel("order_rows", &order_rows_kernel, 1, kThreads, 0, launch.stream, x.order.size[0] - 1,
                CountedTokens(x), data<std::int64_t>(x.order));
}

}  // namespace monoidreduce::cuda
