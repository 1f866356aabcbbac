// The gradients of attention sinks, on any GPU. A sink is one more element of each row of its head, with
// payload 0. Its gradient is the sum over rows of D(P_i, sink) times the upstream gradient, so no score is
// recomputed.
#pragma once

#include <cstdint>

#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/pull.h"
#include "monoidreduce/traits.h"

namespace monoidreduce {
namespace simt {

inline constexpr int kSinkThreads = 1024;

// A block sums the rows of one head in a fixed order. sinks, d_sinks: [heads]. row_count: rows of a head, in
// each batch.
template <class M, class Rows>
__global__ void __launch_bounds__(kSinkThreads)
    sink_gradient(const __grid_constant__ M m, const __grid_constant__ Rows rows,
                  const typename M::Real* sinks, typename M::Real* d_sinks, std::int64_t batches,
                  std::int64_t row_count) {
  static_assert(PayloadMonoid<M> && M::kNormalized && ProductSource<Rows, M>);
  using T = typename M::Real;
  constexpr int kWarps = kSinkThreads / 32;
  static_assert(kWarps == 32);
  constexpr int kAtOnce = sizeof(T) == 4 ? 4 : 1;  // rows of a thread; more spill registers for float64
  const std::int64_t head = blockIdx.x, heads = gridDim.x;
  Element<T> sink{};
  sink.score = sinks[head];
  double sum = 0;  // for float32 too: terms of many rows may nearly cancel
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    const std::int64_t first = (batch * heads + head) * row_count;
#pragma unroll kAtOnce
    for (std::int64_t i = threadIdx.x; i < row_count; i += kSinkThreads)
      sum += pull(m, sink, rows.product(first + i), rows.upstream(first + i), T(0)).score;
  }

  __shared__ double sums[kWarps];
  const auto add = [](double a, double b) { return a + b; };
  sum = reduce_lanes<32>(sum, add);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = reduce_lanes<32>(sums[threadIdx.x], add);
  if (threadIdx.x == 0) d_sinks[head] = static_cast<T>(sum);
}

}  // namespace simt

}  // namespace monoidreduce
