// Compacts the indices of the active rows (not ignored, not masked): these first, then the others, and last
// the number of active rows. Also writes what a sum or a mean of losses multiplies each row's gradient by.
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/ops/rows.h"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

__device__ __forceinline__ std::int64_t scan_warp(std::int64_t value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::int64_t other = __shfl_up_sync(0xffffffffu, value, step);
    if (threadIdx.x % 32 >= step) value += other;
  }
  return value;
}

// The factors of a RowOrdering.
struct UniformFactors {
  const float* upstream;
  float* factors;  // [rows], written; or null
  float unit;
  bool mean;
};

// order: [rows + 1]. One block. A warp has consecutive rows; it first counts its active rows, then places all
// of them, 32 at a time.
__global__ void __launch_bounds__(kThreads)
    order_rows_kernel(std::int64_t rows, const ActiveTokens counted, std::int64_t* order,
                      const UniformFactors uniform) {
  __shared__ std::int64_t up_to[kWarps];  // active rows of a warp and of all warps before it
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int64_t of_warp = (rows + kThreads - 1) / kThreads * 32;
  const std::int64_t begin = ::min(warp * of_warp, rows), end = ::min(begin + of_warp, rows);
  const auto which = [&](std::int64_t first) {
    return __ballot_sync(0xffffffffu, first + lane < end && counted(first + lane));
  };
  std::int64_t count = 0;
#pragma unroll 8
  for (std::int64_t first = begin; first < end; first += 32) count += __popc(which(first));
  if (lane == 0) up_to[warp] = count;
  __syncthreads();
  static_assert(kWarps == 32);
  if (warp == 0) up_to[lane] = scan_warp(up_to[lane]);
  __syncthreads();
  std::int64_t place = up_to[warp] - count, place_of_others = up_to[kWarps - 1] + begin - place;
#pragma unroll 4
  for (std::int64_t first = begin; first < end; first += 32) {
    const unsigned here = which(first), before = (1u << lane) - 1;
    const bool counts = here >> lane & 1;
    if (first + lane < end)
      order[counts ? place + __popc(here & before) : place_of_others + __popc(~here & before)] = first + lane;
    place += __popc(here);
    place_of_others += 32 - __popc(here);
  }
  const std::int64_t active = up_to[kWarps - 1];
  if (threadIdx.x == 0) order[rows] = active;
  if (uniform.factors == nullptr) return;
  const float divisor = uniform.mean ? static_cast<float>(::max(active, std::int64_t{1})) : 1.f;
  const float factor = uniform.unit * (*uniform.upstream / divisor);
  for (std::int64_t row = threadIdx.x; row < rows; row += kThreads) uniform.factors[row] = factor;
}

}  // namespace

template <>
void run(const RowOrdering& x, const Launch& launch) {
  const DeviceGuard device(x.order.cuda_device);
  launch_kernel("order_rows", &order_rows_kernel, 1, kThreads, 0, launch.stream, x.order.size[0] - 1,
                ActiveTokens(x), data<std::int64_t>(x.order),
                UniformFactors{data<const float>(x.upstream), data<float>(x.factors),
                               static_cast<float>(x.unit), x.mean});
}

}  // namespace monoidreduce::cuda
