// Compacts the indices of the active rows (not ignored, not masked): these first, then the others, and last
// the number of active rows. Few rows stay in their own order instead: those that are not active are cleared.
// Both also write what a sum or a mean of losses multiplies each row's gradient by.
#include "monoidreduce/launch/dense_lines.h"
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

// The factors of a RowOrdering or a RowClearing.
struct UniformFactors {
  const float* upstream;
  float* factors;  // [rows], written; or null
  float unit;
  bool mean;

  // The factor of all rows, of which so many are active.
  __device__ float of(std::int64_t active) const {
    const float divisor = mean ? static_cast<float>(::max(active, std::int64_t{1})) : 1.f;
    return unit * (*upstream / divisor);
  }
};
template <class Call>
UniformFactors uniform_factors(const Call& x) {
  return {data<const float>(x.upstream), data<float>(x.factors), static_cast<float>(x.unit), x.mean};
}

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
  const float factor = uniform.of(active);
  for (std::int64_t row = threadIdx.x; row < rows; row += kThreads) uniform.factors[row] = factor;
}

constexpr int kClearingThreads = 256;

// x, out: [rows, vectors of 16 bytes], with lines of pitch and out_pitch vectors. A block copies or clears one row. One
// more block writes the factors [rows + 1].
__global__ void __launch_bounds__(kClearingThreads)
    clear_rows_kernel(std::int64_t rows, const ActiveTokens active, const uint4* x, std::int64_t pitch,
                      uint4* out, std::int64_t out_pitch, int vectors_of_row, const UniformFactors uniform) {
  const std::int64_t row = blockIdx.x;
  if (row < rows) {
    const bool copies = active(row);
    for (int i = threadIdx.x; i < vectors_of_row; i += kClearingThreads)
      out[row * out_pitch + i] = copies ? x[row * pitch + i] : uint4{0, 0, 0, 0};
    return;
  }
  std::int64_t count = 0;
  for (std::int64_t first = 0; first < rows; first += kClearingThreads)
    count += __syncthreads_count(first + threadIdx.x < rows && active(first + threadIdx.x));
  const float factor = uniform.of(count);
  for (std::int64_t i = threadIdx.x; i < rows; i += kClearingThreads)
    uniform.factors[i] = active(i) ? factor : 0.f;
  if (threadIdx.x == 0) uniform.factors[rows] = count > 0 ? factor : 0.f;
}

}  // namespace

template <>
void run(const RowOrdering& x, const Launch& launch) {
  const DeviceGuard device(x.order.cuda_device);
  launch_kernel("order_rows", &order_rows_kernel, 1, kThreads, 0, launch.stream, x.order.size[0] - 1,
                ActiveTokens(x), data<std::int64_t>(x.order), uniform_factors(x));
}

template <>
void run(const RowClearing& x, const Launch& launch) {
  for (const TensorView& t : {x.x, x.out}) require_dense_lines(as_rows(t));
  const DeviceGuard device(x.x.cuda_device);
  const std::int64_t rows = x.x.size[0], of_vector = sizeof(uint4) / item_size(x.x.dtype);
  const std::int64_t blocks = rows + x.factors.present();
  if (blocks == 0) return;
  launch_kernel("clear_rows", &clear_rows_kernel, blocks_for(blocks), kClearingThreads, 0, launch.stream,
                rows, ActiveTokens(x), data<const uint4>(x.x), x.x.stride[0] / of_vector, data<uint4>(x.out),
                x.out.stride[0] / of_vector, static_cast<int>(x.x.size[1] / of_vector), uniform_factors(x));
}

}  // namespace monoidreduce::cuda
