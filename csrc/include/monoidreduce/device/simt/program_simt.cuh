// A program (device/program/statistics.h) on any GPU, for any element type, width and strides: its fold, and
// its local gradients. A block computes tiles of 64 x 64 dot products; four neighbouring lanes each have 16
// columns of a row (tile.cuh).
#pragma once

#include "monoidreduce/device/block/tile.cuh"
#include "monoidreduce/device/program/statistics.h"
#include "monoidreduce/device/simt/splits.cuh"
#include "monoidreduce/device/warp/lanes.cuh"

namespace monoidreduce::simt {

struct ProgramOperands {
  Tensor rows[2], columns[2];  // [1, 1, rows, width] and [1, 1, columns, width], for each score
};

// Computes the dot products of a tile: of the first score in memory.first, of the second in memory.second.
template <int kScores, class T>
__device__ __forceinline__ void multiply_operands(TileMemory<T>& memory, const ProgramOperands& p,
                                                  std::int64_t row0, std::int64_t column0) {
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < kScores; ++n) {
    multiply_rows<true>(n == 0 ? memory.first : memory.second, memory, Matrix<T>(p.rows[n], 0, 0), row0,
                        Matrix<T>(p.columns[n], 0, 0), column0);
  }
  __syncthreads();
}

// Element n of the calling thread's row, with scores from the dot products in memory.
template <class P, class T>
__device__ __forceinline__ ProgramElement<P> element_of(const TileMemory<T>& memory, const ProgramData& data,
                                                        const ProgramRow<P>& row, std::int64_t column0,
                                                        int n) {
  const int at = element_column(n) * kPitch + element_row();
  const T scale = static_cast<T>(data.scale);
  return data.element<P>(multiply_add(memory.first[at], scale, T(-0.f)),
                         P::kScores == 2 ? multiply_add(memory.second[at], scale, T(-0.f)) : T(0), row,
                         column0 + element_column(n));
}

// The fold. A block computes the states of 64 rows: over all columns or, if columns are split (splits.cuh), over
// those of one split.
template <class P>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<typename P::Real>)
    fold_program(const __grid_constant__ ProgramOperands p, const __grid_constant__ ProgramData data,
                 const __grid_constant__ StatisticsResults results, const __grid_constant__ Splits splits) {
  using T = typename P::Real;
  extern __shared__ __align__(32) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<TileMemory<T>*>(shared_bytes);
  const StatisticsSum<P> sum;
  const std::int64_t tiles = divide_up(data.rows, kTile);

#pragma unroll 1
  for (std::int64_t job = blockIdx.x; job < tiles * splits.count; job += gridDim.x) {
    const std::int64_t row0 = job % tiles * kTile, row = row0 + element_row(), split = job / tiles;
    std::int64_t first_column = 0, end_column = data.columns;
    splits.take(first_column, end_column, split);
    const ProgramRow<P> of_row = data.of_row<P>(min(row, data.rows - 1));
    StatisticsState<P> state = sum.identity();
    StatisticsSums<P> low{};
#pragma unroll 1
    for (std::int64_t column0 = first_column; column0 < end_column; column0 += kTile) {
      multiply_operands<P::kScores>(memory, p, row0, column0);
      StatisticsState<P> of_tile[1] = {sum.identity()};
      fold_elements<P, kLaneElements, false>(
          of_tile, [](int) { return 0; },
          [&](int n) { return element_of<P>(memory, data, of_row, column0, n); },
          [&](int n) { return column0 + element_column(n) < data.columns; });
      sum.add(state, low, of_tile[0]);
    }
    state.sums.add(low);
    const auto whole =
        reduce_lanes<kRowLanes>(state, [&](const auto& s, const auto& t) { return sum.combine(s, t); });
    if (row >= data.rows || threadIdx.x % kRowLanes != 0) continue;
    if (splits.count == 1)
      results.store<P>(row, whole);
    else
      static_cast<StatisticsState<P>*>(splits.partial)[split * data.rows + row] = whole;
  }
}

// Combines the states of a row's splits, in order. One thread takes a row, and keeps the rounding errors of its
// sums in `low`. A reduction over the lanes of a warp has no such second number, and would round at each of its
// five steps.
template <class P>
__global__ void __launch_bounds__(kThreads)
    combine_states(const __grid_constant__ StatisticsResults results, const __grid_constant__ Splits splits) {
  const auto* const partial = static_cast<const StatisticsState<P>*>(splits.partial);
  const StatisticsSum<P> sum;
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= results.rows) return;
  StatisticsState<P> state = sum.identity();
  StatisticsSums<P> low{};
#pragma unroll 1
  for (std::int64_t split = 0; split < splits.count; ++split)
    sum.add(state, low, partial[split * results.rows + row]);
  state.sums.add(low);
  results.store<P>(row, state);
}

// The local gradients. of: [1, 1, rows, columns] of the accumulation type, for each score.
struct ProgramOuts {
  Tensor of[2];
};
template <class P>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<typename P::Real>)
    pull_program(const __grid_constant__ ProgramOperands p, const __grid_constant__ ProgramData data,
                 const __grid_constant__ ProgramOuts outs) {
  using T = typename P::Real;
  extern __shared__ __align__(32) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<TileMemory<T>*>(shared_bytes);
  const std::int64_t column_tiles = divide_up(data.columns, kTile),
                     tiles = divide_up(data.rows, kTile) * column_tiles;

#pragma unroll 1
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t row0 = tile / column_tiles * kTile, column0 = tile % column_tiles * kTile;
    const std::int64_t row = row0 + element_row();
    const ProgramRow<P> of_row = data.of_row<P>(min(row, data.rows - 1));
    multiply_operands<P::kScores>(memory, p, row0, column0);
#pragma unroll 1
    for (int n = 0; n < kLaneElements; ++n) {
      const std::int64_t column = column0 + element_column(n);
      if (row >= data.rows || column >= data.columns) continue;
      const auto g = P::gradient(element_of<P>(memory, data, of_row, column0, n));
      const T scale = static_cast<T>(data.scale);
      Matrix<T>(outs.of[0], 0, 0).write(row, column, g.score * scale);
      if constexpr (P::kScores == 2) Matrix<T>(outs.of[1], 0, 0).write(row, column, g.other * scale);
    }
  }
}

}  // namespace monoidreduce::simt
