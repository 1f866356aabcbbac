// Split-KV: the columns of a tile of rows are split between blocks. Each split stores the partial state of
// its rows and the payload's sums, measured in the frame (row max) of that state. A second kernel combines
// the splits, always in the same order.
#pragma once

#include "monoidreduce/device/resident/row_fragment.cuh"
#include "monoidreduce/device/warp/lanes.cuh"

namespace monoidreduce {

// Whether splits store states: only if the payload's sums have a frame or are divided by a mass (attention).
// Otherwise (MLP) the result does not depend on the states.
template <PayloadMonoid M>
inline constexpr bool kLeavesStates = M::kNormalized || !std::is_empty_v<typename M::Frame>;

// The partial results of the splits, in scratch memory aligned to 16 bytes.
template <PayloadMonoid M>
struct PartialRows {
  float* sums;                // [splits, rows, width]; rows: of all batches and heads
  typename M::State* states;  // [splits, rows], if kLeavesStates
  std::int64_t rows;
  int width;  // a multiple of 8
};

// Stores a split's partial results for the lines [first, first + 64) of its job.
template <PayloadMonoid M, class Job, int kSize>
__device__ __forceinline__ void store_partial_rows(const typename M::State (&state)[2],
                                                   const float (&sums)[kSize], const FoldShape& shape,
                                                   const Job& job, int first, const PartialRows<M>& to) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int line = first + fragment_row(r);
    if (!job.has(shape, line)) continue;
    const std::int64_t place = job.split * to.rows + flat_row(shape, job, line);
    if constexpr (kLeavesStates<M>) {
      if (threadIdx.x % kLanesOfRow == 0) to.states[place] = state[r];
    }
    float* const row = to.sums + place * to.width + fragment_column(0);
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      if (2 * i < to.width) *reinterpret_cast<float2*>(row + 2 * i) = {sums[i + 2 * r], sums[i + 2 * r + 1]};
    }
  }
}

inline constexpr int kCombiningWarps = 4;

// One block combines one row. Each lane has 8 components of the payload, and each warp takes every
// kCombiningWarps-th split: the time is spent waiting for loads, one after another.
template <class E, class M, class Rows>
__global__ void __launch_bounds__(32 * kCombiningWarps)
    combine_splits_kernel(const __grid_constant__ M m, const __grid_constant__ PartialRows<M> from,
                          int splits, const __grid_constant__ FoldShape shape,
                          const __grid_constant__ Rows rows, const __grid_constant__ OutputRows out) {
  static_assert(PayloadRows<Rows, M>);
  constexpr int kLaneWidth = 8;
  using Whole = WithPayload<M, kLaneWidth>;
  __shared__ typename Whole::State of_warps[kCombiningWarps][32];
  const Whole whole{m};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column0 = lane * kLaneWidth;
  const std::int64_t row = blockIdx.x;
  const bool there = column0 < from.width;
  typename Whole::State state = whole.identity();
#pragma unroll 2
  for (int split = warp; split < splits; split += kCombiningWarps) {
    const std::int64_t place = split * from.rows + row;
    typename Whole::State part = whole.identity();
    if constexpr (kLeavesStates<M>) part.scalar = from.states[place];
    if (there) {
      const float4* const sums = reinterpret_cast<const float4*>(from.sums + place * from.width + column0);
      const float4 low = sums[0], high = sums[1];
      part.payload[0] = low.x, part.payload[1] = low.y, part.payload[2] = low.z, part.payload[3] = low.w;
      part.payload[4] = high.x, part.payload[5] = high.y, part.payload[6] = high.z, part.payload[7] = high.w;
    }
    state = whole.combine(state, part);
  }
  of_warps[warp][lane] = state;
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int other = 1; other < kCombiningWarps; ++other) state = whole.combine(state, of_warps[other][lane]);

  const int batch_head = static_cast<int>(row / shape.rows), head = batch_head % shape.heads;
  const float factor = end_fold(m, state.scalar, rows, [&] { return head; });
  float result[kLaneWidth], probe = 0.f;  // probe: NaN if a result is not finite
#pragma unroll
  for (int d = 0; d < kLaneWidth; ++d) result[d] = state.payload[d].x * factor;
  if (there) rows.output_of(result, column0);
#pragma unroll
  for (int d = 0; d < kLaneWidth; ++d) probe += result[d] * 0.f;
  const bool finite = __all_sync(0xffffffffu, !there || probe == 0.f);
  if (lane == 0) rows.store(row, head, m.project(state.scalar), !shape.partial() || finite);
  if (!there) return;
  const std::int64_t at = batch_head / shape.heads * out.stride[0] + head * out.stride[1] +
                          (row - std::int64_t{batch_head} * shape.rows) * out.stride[2] + column0;
  if constexpr (std::is_same_v<E, float>) {
    float4* const to = reinterpret_cast<float4*>(static_cast<float*>(out.data) + at);
    to[0] = {result[0], result[1], result[2], result[3]};
    to[1] = {result[4], result[5], result[6], result[7]};
  } else {
    const auto store = [&](void* data) {
      *reinterpret_cast<uint4*>(static_cast<E*>(data) + at) = {
          arch::pack<E>(result[0], result[1]), arch::pack<E>(result[2], result[3]),
          arch::pack<E>(result[4], result[5]), arch::pack<E>(result[6], result[7])};
    };
    store(out.data);
    if (!out.low) return;
#pragma unroll
    for (int d = 0; d < kLaneWidth; ++d) result[d] = low_word(result[d], float(E(result[d])));
    store(out.low);
  }
}

}  // namespace monoidreduce
