// The backward fold on any GPU: any monoid, any scores (elements.cuh), any element type, width and strides.
//
// Corollary 2.1.3 of the paper (monoid.h): dP_i / dX_ij = D(P_i, X_ij). So a tile of 64 x 64 elements needs
// only its own rows, its own columns and the final products P_i. It recomputes its scores, pulls the upstream
// gradient through D and multiplies:
//
//   dz_ij = pull(X_ij, P_i, g_i, u_ij)   u = G V^T       w_ij = the element's share of the output (attention: p)
//   d_a += dz B    d_b += dz^T A    d_payload += w^T G    d_bias += dz
//
// Operands come in pairs of rows and columns: (A, B), and (other A, other B) or (G, V). The product of a pair
// is a tile of dot products. The tile becomes gradients or weights. Multiplied by one operand of the pair, it
// gives the gradient of the other.
//
// One kernel has three ways to walk the tiles (Walk). By default every tile is a job of its own and adds with
// atomics, in an order that changes from run to run. The deterministic mode computes every tile once for each
// kind of gradient: a pass over the rows (d_a), one over the columns (d_b, d_payload) and one over the bias.
// In each pass a block owns what it adds to.
#pragma once

#include "monoidreduce/device/block/accumulate.cuh"
#include "monoidreduce/device/block/elements.cuh"
#include "monoidreduce/pull.h"
#include "monoidreduce/traits.h"

namespace monoidreduce {
namespace simt {

struct OperandPair {
  Tensor rows, columns;      // [B, H, M, K] [B, Hc, N, K]
  Tensor d_rows, d_columns;  // the same shapes; absent: not wanted
};

struct PullArguments {
  OperandPair pair[2];
  int pairs;
  Tensor bias, d_bias;  // [B, H, M, N]
  ColumnRange range;
  bool whole;
};

// The grid of tiles of elements, with five axes. Query head = column head * group + member.
struct Walk {
  enum Axis { kBatch, kColumnHead, kMember, kRowTile, kColumnTile, kAxes };
  std::int64_t extent[kAxes];
  bool looped[kAxes];  // true: one block walks this axis, in order; false: it is spread over the grid
  bool exclusive;      // only one block adds to an element of a gradient

  MR_HD std::int64_t count(bool of_looped) const {
    std::int64_t n = 1;
    for (int axis = 0; axis < kAxes; ++axis) n *= looped[axis] == of_looped ? extent[axis] : 1;
    return n;
  }
};

// The gradient of the tables that scores read (program/table_gradient.cuh); of none, if its type is NoTables.
struct NoTables {
  template <class At, class T>
  __device__ __forceinline__ void operator()(const At&, T, T) {}
  __device__ __forceinline__ void finish() const {}
};
template <class Scores>
__device__ __forceinline__ auto table_gradient_of(const Scores& scores) {
  if constexpr (HasTableGradient<Scores>)
    return scores.table_gradient();
  else
    return NoTables{};
}

// The place of a tile.
struct TilePlace {
  std::int64_t batch, head, column_head, row0, column0;
};

// The tile of step `step` of a job; the last axis is the fastest.
__device__ __forceinline__ TilePlace place_of(const Walk& walk, std::int64_t job, std::int64_t step) {
  std::int64_t at[Walk::kAxes];
#pragma unroll
  for (int axis = Walk::kAxes - 1; axis >= 0; --axis) {
    const bool looped = walk.looped[axis];
    const std::int64_t number = looped ? step : job, rest = number / walk.extent[axis];
    at[axis] = number - rest * walk.extent[axis];
    step = looped ? rest : step;
    job = looped ? job : rest;
  }
  return {at[Walk::kBatch], at[Walk::kColumnHead] * walk.extent[Walk::kMember] + at[Walk::kMember],
          at[Walk::kColumnHead], at[Walk::kRowTile] * kTile, at[Walk::kColumnTile] * kTile};
}

// Pulls the upstream gradient through every element of the tile, in place. On entry memory.first has the dot
// products of the first pair, and memory.second those of the second pair. On return memory.first has the
// gradient with respect to the argument of the softcap (or, if its gradient is wanted, to a bias outside the
// softcap). memory.second has the same for the second score, or the weights. Both are 0 where an element is
// not valid.
template <bool kPayload, Monoid M, RowPolicy<M> Rows, class Policy>
__device__ __forceinline__ void pull_elements(TileMemory<typename M::Real>& memory, const M& m,
                                              const PullArguments& p, const Policy& score, const Rows& rows,
                                              const TilePlace& at, std::int64_t flat_row, Validity valid) {
  using T = typename M::Real;
  const std::int64_t row = at.row0 + element_row();
  const auto scores = scores_of_head(score, p.bias, at.batch, at.head);
  constexpr bool kDrops = DropsWeights<std::remove_cvref_t<decltype(scores)>>;
  const bool slope_wanted = score.bias_inside || p.d_bias.data == nullptr;
  typename M::Output product{};
  typename M::Upstream upstream{};
  Index<T> label{};
  T factor(1);
  if (valid.bits) {
    product = rows.product(flat_row);
    upstream = rows.upstream(flat_row);
    label = static_cast<Index<T>>(rows.label(flat_row));
    factor = factor_of<T>(rows, flat_row);
  }
  // A row whose columns are all in this tile computes its delta, <G_i, out_i>, from them (delta_term).
  if constexpr (kPayload && KnowsProductGradient<Rows, M>) {
    const std::int64_t columns = p.pair[0].columns.size[2];
    const bool within =
        valid.bits && at.column0 <= p.range.begin(row) && p.range.end(row, columns) <= at.column0 + kTile;
    if (p.pairs == 2 && p.whole && __any_sync(~0u, within)) {
      T mean = T(0);
#pragma unroll 1
      for (int n = 0; n < kLaneElements; ++n) {
        const std::int64_t column = at.column0 + element_column(n);
        const int place = element_column(n) * kPitch + element_row();
        if (!valid[n]) continue;
        const T dot = memory.first[place];
        const Element<T> e{scores.at(row, column).value(dot), T(0), static_cast<Index<T>>(column), label,
                           factor};
        T u = memory.second[place];
        if constexpr (kDrops) u *= scores.at(row, column).factor();
        mean += delta_term(m, e, product, u);
      }
      mean = reduce_lanes<kRowLanes>(mean, [](T a, T b) { return a + b; });
      if (within) upstream = rows.product_gradient(flat_row) - mean;
    }
  }
  auto tables = table_gradient_of(scores);
  with_named(m, [&](const auto& m) {
#pragma unroll 2
    for (int n = 0; n < kLaneElements; ++n) {
      const int place = element_column(n) * kPitch + element_row();
      const std::int64_t column = at.column0 + element_column(n);
      T first = T(0), second = T(0);
      if (valid[n]) {
        const T dot = memory.first[place];
        const auto of_element = scores.at(row, column);
        T second_dot = p.pairs == 2 ? memory.second[place] : T(0);
        if constexpr (kDrops) second_dot *= of_element.factor();
        Element<T> e{of_element.value(dot), T(0), static_cast<Index<T>>(column), label, factor};
        if constexpr (kPayload) {
          const auto pulled = pull(m, e, product, upstream, second_dot);
          first = pulled.score;
          second = pulled.weight;
          if constexpr (kDrops) second *= of_element.factor();
        } else {
          if constexpr (M::kScores == 2) e.other = score.value(second_dot, T(0));
          const Gradient<T> pulled = pull(m, e, product, upstream);
          first = pulled.score;
          if constexpr (M::kScores == 2) second = pulled.other * score.slope(second_dot, T(0));
        }
        tables(of_element, dot, first);
        if (slope_wanted) first = of_element.chain(first, dot);
      }
      memory.first[place] = first;
      if (p.pairs == 2) memory.second[place] = second;
    }
  });
  tables.finish();
}

// to += scale times the tile in memory.first (with along_rows its transpose) times 64 rows of `from`.
template <class T>
__device__ __forceinline__ void add_product(TileMemory<T>& memory, const Matrix<T>& to, std::int64_t to_row,
                                            T scale, const Matrix<T, true>& from, std::int64_t from_row,
                                            bool along_rows, bool full, bool exclusive) {
#pragma unroll 1
  for (std::int64_t k = 0; k < to.width(); k += kTile) {
    ThreadTile<T> sum;
    clear<T>(sum);
    multiply_tile(sum, memory, along_rows, full, from, from_row, k);
    add_tile(to, to_row, k, sum, scale, exclusive);
  }
}

// Adds everything that one tile of elements contributes to the wanted gradients.
template <bool kPayload, Monoid M, RowPolicy<M> Rows, class Policy>
__device__ __forceinline__ void pull_tile(TileMemory<typename M::Real>& memory, const M& m,
                                          const PullArguments& p, const Policy& score, const Rows& rows,
                                          const TilePlace& at, bool exclusive) {
  using T = typename M::Real;
  const Tensor& a = p.pair[0].rows;
  const std::int64_t row = at.row0 + element_row(),
                     flat_row = (at.batch * a.size[1] + at.head) * a.size[2] + row;
  const bool active = row < a.size[2] && rows.active(flat_row);
  const auto scores = scores_of_head(score, p.bias, at.batch, at.head);
  static_assert(ElementScores<decltype(scores), T>);
  if (!scores.touches(at.row0, at.column0)) return;
  const Validity valid =
      find_valid(memory, p.range, scores, active, p.pair[0].columns.size[2], at.row0, at.column0);
  if (!valid.any) return;

#pragma unroll 1
  for (int n = 0; n < p.pairs; ++n) {
    multiply_rows<!kPayload>(n == 0 ? memory.first : memory.second, memory,
                             Matrix<T>(p.pair[n].rows, at.batch, at.head), at.row0,
                             Matrix<T>(p.pair[n].columns, at.batch, at.column_head), at.column0);
  }
  __syncthreads();
  pull_elements<kPayload>(memory, m, p, score, rows, at, flat_row, valid);
  __syncthreads();

  if (p.d_bias.data) {
    add_broadcast_tile(Matrix<T>(p.d_bias, at.batch, at.head), at.row0, at.column0, memory.first, exclusive);
  }
  // The second tile is moved to registers: its memory is used for staging. Later it takes the place of the
  // first tile.
  ThreadTile<T> second;
  if constexpr (kPayload || M::kScores == 2) get_tile(second, memory.second);
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < p.pairs; ++n) {
    const OperandPair& pair = p.pair[n];
    const T scale = kPayload && n == 1 ? T(1) : score.scale;
    if constexpr (kPayload || M::kScores == 2) {
      if (n == 1) put_tile(memory.first, second);
    }
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const bool of_rows = side == 0;
      const Tensor& wanted = of_rows ? pair.d_rows : pair.d_columns;
      const std::int64_t wanted_head = of_rows ? at.head : at.column_head,
                         from_head = of_rows ? at.column_head : at.head;
      const std::int64_t wanted_row = of_rows ? at.row0 : at.column0,
                         from_row = of_rows ? at.column0 : at.row0;
      if (wanted.data == nullptr) continue;
      if (!of_rows) transpose_tile(memory.first);
      add_product(memory, Matrix<T>(wanted, at.batch, wanted_head), wanted_row, scale,
                  Matrix<T, true>(of_rows ? pair.columns : pair.rows, at.batch, from_head), from_row,
                  !of_rows, valid.full, exclusive);
    }
  }
}

template <bool kPayload, class M, class Rows, class Policy = Score<typename M::Real>>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<typename M::Real>)
    fold_backward(const __grid_constant__ M m, const __grid_constant__ PullArguments p,
                  const __grid_constant__ Policy score, const __grid_constant__ Rows rows,
                  const __grid_constant__ Walk walk) {
  static_assert(Monoid<M> && RowPolicy<Rows, M>);
  extern __shared__ __align__(32) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<TileMemory<typename M::Real>*>(shared_bytes);
  const std::int64_t jobs = walk.count(false), steps = walk.count(true);
#pragma unroll 1
  for (std::int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
#pragma unroll 1
    for (std::int64_t step = 0; step < steps; ++step) {
      pull_tile<kPayload>(memory, m, p, score, rows, place_of(walk, job, step), walk.exclusive);
    }
  }
}

}  // namespace simt

}  // namespace monoidreduce
