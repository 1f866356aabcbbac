// A user's monoid (mr.cpp_monoid) on any GPU, for any element type, width and strides: its fold, its local
// gradients, and a test of its laws. The kernels have the same parameters as those of a program
// (program_simt.cuh), so the same functions launch them.
#pragma once

#include "monoidreduce/device/program/law_claims.h"
#include "monoidreduce/device/simt/fold_forward_simt.cuh"
#include "monoidreduce/device/simt/program_simt.cuh"
#include "monoidreduce/pull.h"

namespace monoidreduce::simt {

// Number k of a row: of its reals, and of its integers.
template <class R>
__device__ __forceinline__ R real_of(const ProgramData& data, int k, std::int64_t row) {
  return static_cast<const R*>(data.row)[k * data.row_pitch + row];
}
template <class R>
__device__ __forceinline__ Index<R> index_of(const ProgramData& data, int k, std::int64_t row) {
  return saturated<Index<R>>(data.row_index[k * data.row_index_pitch + row]);
}

// Element n of the calling thread's row, with scores from the dot products in memory.
template <class M>
__device__ __forceinline__ Element<typename M::Real> monoid_element(
    const TileMemory<typename M::Real>& memory, const ProgramData& data, Index<typename M::Real> label,
    std::int64_t column0, int n) {
  using R = typename M::Real;
  const int at = element_column(n) * kPitch + element_row();
  const R scale = static_cast<R>(data.scale);
  return {multiply_add(memory.first[at], scale, R(-0.f)),
          M::kScores == 2 ? multiply_add(memory.second[at], scale, R(-0.f)) : R(0),
          static_cast<Index<R>>(data.first_column + column0 + element_column(n)), label};
}

// The fold. A row's only integer is its label. Results: values are the reals of P_i that have a gradient, low
// its other reals, indices its integers.
template <class M, class Fields>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<typename M::Real>)
    fold_monoid(const __grid_constant__ ProgramOperands p, const __grid_constant__ ProgramData data,
                const __grid_constant__ StatisticsResults results) {
  using R = typename M::Real;
  extern __shared__ __align__(32) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<TileMemory<R>*>(shared_bytes);
  const M m{};
  const std::int64_t tiles = divide_up(data.rows, kTile);

#pragma unroll 1
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t row0 = tile * kTile, row = row0 + element_row();
    const Index<R> label = index_of<R>(data, 0, min(row, data.rows - 1));
    typename M::State state = m.identity();
#pragma unroll 1
    for (std::int64_t column0 = 0; column0 < data.columns; column0 += kTile) {
      multiply_operands<M::kScores>(memory, p, row0, column0);
      Validity valid{};
#pragma unroll
      for (int n = 0; n < kLaneElements; ++n)
        valid.bits |= unsigned{column0 + element_column(n) < data.columns} << n;
      fold_elements<false>(
          m, state, valid, [&](int n) { return monoid_element<M>(memory, data, label, column0, n); },
          [](int, R) {});
    }
    state = reduce_lanes<kRowLanes>(state, [&](const auto& s, const auto& t) { return combine(m, s, t); });
    if (row >= data.rows || threadIdx.x % kRowLanes != 0) continue;
    Numbers<R, Fields::kReals> real;
    Numbers<Index<R>, Fields::kIndices> index;
    Fields::unpack(m.project(state), real, index);
#pragma unroll
    for (int k = 0; k < Fields::kReals; ++k) {
      R* const numbers = static_cast<R*>(k < Fields::kGradients ? results.values : results.low);
      numbers[(k < Fields::kGradients ? k : k - Fields::kGradients) * results.rows + row] = real[k];
    }
#pragma unroll
    for (int k = 0; k < Fields::kIndices; ++k) results.indices[k * results.rows + row] = index[k];
  }
}

// The local gradients. A row's reals are the reals of P_i, then the gradients with respect to the first of
// these. Its integers are the label, then the integers of P_i.
template <class M, class Fields>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<typename M::Real>)
    pull_monoid(const __grid_constant__ ProgramOperands p, const __grid_constant__ ProgramData data,
                const __grid_constant__ ProgramOuts outs) {
  using R = typename M::Real;
  extern __shared__ __align__(32) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<TileMemory<R>*>(shared_bytes);
  const M m{};
  const std::int64_t column_tiles = divide_up(data.columns, kTile),
                     tiles = divide_up(data.rows, kTile) * column_tiles;

#pragma unroll 1
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t row0 = tile / column_tiles * kTile, column0 = tile % column_tiles * kTile;
    const std::int64_t row = row0 + element_row(), there = min(row, data.rows - 1);
    Numbers<R, Fields::kReals> real;
    Numbers<R, Fields::kGradients> g;
    Numbers<Index<R>, Fields::kIndices> index;
#pragma unroll
    for (int k = 0; k < Fields::kReals; ++k) real[k] = real_of<R>(data, k, there);
#pragma unroll
    for (int k = 0; k < Fields::kGradients; ++k) g[k] = real_of<R>(data, Fields::kReals + k, there);
#pragma unroll
    for (int k = 0; k < Fields::kIndices; ++k) index[k] = index_of<R>(data, 1 + k, there);
    const Index<R> label = index_of<R>(data, 0, there);
    const typename M::Output product = Fields::pack(real, index);
    const typename M::Upstream upstream = Fields::upstream(g);

    multiply_operands<M::kScores>(memory, p, row0, column0);
#pragma unroll 1
    for (int n = 0; n < kLaneElements; ++n) {
      const std::int64_t column = column0 + element_column(n);
      if (row >= data.rows || column >= data.columns) continue;
      const Gradient<R> pulled =
          pull(m, monoid_element<M>(memory, data, label, column0, n), product, upstream);
      const R scale = static_cast<R>(data.scale);
      Matrix<R>(outs.of[0], 0, 0).write(row, column, pulled.score * scale);
      if constexpr (M::kScores == 2) Matrix<R>(outs.of[1], 0, 0).write(row, column, pulled.other * scale);
    }
  }
}

// Tests the laws; a thread uses the elements of its row. A row's reals are the scores of each element, then
// the gradients with respect to the results; its integer is the label. Results: values are the numbers of
// LawClaims. The operands are not read.
template <class M, class Fields>
__global__ void __launch_bounds__(kThreads)
    try_laws(const __grid_constant__ ProgramOperands, const __grid_constant__ ProgramData data,
             const __grid_constant__ StatisticsResults results) {
  using R = typename M::Real;
  using Claims = LawClaims<M, Fields>;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
#pragma unroll 1
  for (std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; row < data.rows; row += step) {
    int at = 0;
    Element<R> e[Claims::kElements];
    for (int i = 0; i < Claims::kElements; ++i) {
      const R score = real_of<R>(data, at++, row),
              other = M::kScores == 2 ? real_of<R>(data, at++, row) : R(0);
      e[i] = {score, other, static_cast<Index<R>>(i), index_of<R>(data, 0, row)};
    }
    Numbers<R, Fields::kGradients> g;
    for (int k = 0; k < Fields::kGradients; ++k) g[k] = real_of<R>(data, at++, row);
    R* value = static_cast<R*>(results.values) + row;
    Claims::write_all(e, g, [&](R number) { *value = number, value += results.rows; });
  }
}

}  // namespace monoidreduce::simt
