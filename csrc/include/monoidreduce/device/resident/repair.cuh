// Repairs results that masking made NaN. With a mask (a window, or a bool bias) the tensor cores multiply
// masked elements by 0, and 0 times infinity or NaN is NaN. Planes of float16 (block/planes_sm90.cuh) spread an
// infinity or NaN too, over its whole line.
//
// So where a mask excludes some element of a tile, or operands are planes, the fold's kernels mark results that
// are not finite. The kernels here run after them and recompute the marked results from the kept elements alone. A
// warp takes one row or column; its lanes share the width. If all inputs are finite, nothing is marked and the
// kernels end at once. The loop over a row's columns stops when its result is NaN, as nothing can change that any
// more. It goes on if the kernel also writes the gradient of a bias of scores, because each column has a number there.
#pragma once

#include "monoidreduce/device/block/elements.cuh"
#include "monoidreduce/device/block/matrix.cuh"
#include "monoidreduce/device/resident/row_residuals.cuh"
#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/pull.h"
#include "monoidreduce/score.h"
#include "monoidreduce/traits.h"

namespace monoidreduce {

inline constexpr int kWarp = 32, kLaneWidth = 8;  // kLaneWidth: elements of a lane, for widths up to 256
inline constexpr int kRepairThreads = 256;

// A row of up to 256 elements, spread over the lanes of a warp.
struct WarpRow {
  float x[kLaneWidth];

  __device__ __forceinline__ static WarpRow zero() { return {}; }
  __device__ __forceinline__ static WarpRow read(const Matrix<float>& m, std::int64_t row) {
    WarpRow v = zero();
#pragma unroll
    for (int n = 0; n < kLaneWidth; ++n) {
      const int k = threadIdx.x % kWarp + n * kWarp;
      if (k < m.width()) v.x[n] = m.read(row, k);
    }
    return v;
  }
  // Writes nothing if the matrix is absent.
  __device__ __forceinline__ void write(const Matrix<float>& m, std::int64_t row) const {
    if (m.tensor.data == nullptr) return;
#pragma unroll
    for (int n = 0; n < kLaneWidth; ++n) {
      const int k = threadIdx.x % kWarp + n * kWarp;
      if (k < m.width()) m.write(row, k, x[n]);
    }
  }
  // Writes what the rounding of `high` lost; `high` must have been written by the same lanes.
  __device__ __forceinline__ void write_low(const Matrix<float>& low, const Matrix<float>& high,
                                            std::int64_t row) const {
#pragma unroll
    for (int n = 0; n < kLaneWidth; ++n) {
      const int k = threadIdx.x % kWarp + n * kWarp;
      if (k < low.width()) low.write(row, k, low_word(x[n], high.read(row, k)));
    }
  }
  __device__ __forceinline__ float dot(const WarpRow& other) const {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < kLaneWidth; ++n) sum += x[n] * other.x[n];
    return reduce_lanes<kWarp>(sum, [](float a, float b) { return a + b; });
  }
  // Whether all elements are NaN: no addition changes that.
  __device__ __forceinline__ bool is_lost(int width) const {
    bool lost = true;
#pragma unroll
    for (int n = 0; n < kLaneWidth; ++n)
      lost = lost && (isnan(x[n]) || int(threadIdx.x % kWarp) + n * kWarp >= width);
    return __all_sync(0xffffffffu, lost);
  }
  // this = this * scale + weight * other
  __device__ __forceinline__ void add(float scale, float weight, const WarpRow& other) {
#pragma unroll
    for (int n = 0; n < kLaneWidth; ++n) x[n] = x[n] * scale + weight * other.x[n];
  }
};

// Shapes as in FoldProblem, FoldOutput and FoldGradients (fold.h).
struct RepairArguments {
  Tensor rows, columns, payload, bias, out_bias, out, low;  // forward pass
  Tensor grad_out, d_rows, d_columns, d_payload;            // backward pass
  Tensor d_bias;         // the gradient of biases that no scores share; or absent
  float* d_column_bias;  // [columns], or null
  ColumnRange range;
  float scale;  // of dot products; backward pass
};

// The scores of a head, element by element (ElementScores). Those of users' functions are computed in float.
template <class R>
__device__ __forceinline__ BiasedScoresOfHead<R, float> scores_to_repair(const Score<R>& score,
                                                                         const Tensor& bias,
                                                                         std::int64_t batch,
                                                                         std::int64_t head) {
  return {score, Matrix<float>(bias, batch, head)};
}
template <class Scores>
__device__ __forceinline__ auto scores_to_repair(const Scores& scores, const Tensor& bias, std::int64_t batch,
                                                 std::int64_t head) {
  return scores_of_head(scores, bias, batch, head);
}
template <class Scores>
__device__ __forceinline__ bool keeps(const Scores& scores, std::int64_t row, std::int64_t column) {
  return !scores.masks() || scores.keeps(row, column);
}
// What an element's weight is multiplied by: with dropout 0 or more than 1.
template <class Scores, class At>
__device__ __forceinline__ float factor_of_weight(const Scores&, const At& at) {
  if constexpr (DropsWeights<Scores>)
    return at.factor();
  else
    return 1.f;
}

__device__ __forceinline__ std::int64_t warp_of_grid() {
  return (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
}
__device__ __forceinline__ std::int64_t warps_of_grid() {
  return std::int64_t{gridDim.x} * blockDim.x / kWarp;
}

// Recomputes marked rows. A normalized M is a monoid over double, because the mass of a row is one long sum.
// Policy: Score, or the scores of users' functions.
template <class M, class Rows, class Policy = Score<typename M::Real>>
__global__ void __launch_bounds__(kRepairThreads)
    repair_forward_kernel(const __grid_constant__ RepairArguments p, const __grid_constant__ M m,
                          const __grid_constant__ Policy score, const __grid_constant__ Rows rows) {
  static_assert(PayloadMonoid<M> && MarkedRows<Rows, M>);
  using R = typename M::Real;
  const std::int64_t heads = p.rows.size[1], count = p.rows.size[2], columns = p.columns.size[2];
  const std::int64_t group = heads / p.columns.size[1], all = p.rows.size[0] * heads * count;
  const auto repair_row = [&](std::int64_t flat) {
    const std::int64_t row = flat % count, head = flat / count % heads, batch = flat / count / heads;
    const Matrix<float> b(p.columns, batch, head / group), v(p.payload, batch, head / group);
    const WarpRow a = WarpRow::read(Matrix<float>(p.rows, batch, head), row);
    const auto scores = scores_to_repair(score, p.bias, batch, head);
    typename M::State state = m.identity();
    WarpRow sum = WarpRow::zero();
    if constexpr (RowsWithSinks<Rows, M>) {
      if (rows.has_sinks()) {  // first, so that a row with a NaN sink ends at its first column
        const R scale = join_sink(m, state, rows.sink(head));
        sum.add(float(scale), 0.f, sum);
      }
    }
#pragma unroll 1
    for (std::int64_t j = p.range.begin(row); j < p.range.end(row, columns); ++j) {
      if (!keeps(scores, row, j)) continue;
      const auto at = scores.at(row, j);
      const Element<R> e{R(at.value(a.dot(WarpRow::read(b, j)))), R(0), 0, -1};
      R weight;
      const auto before = m.frame_of(state), frame = m.join(before, m.frame(e));
      with_named(m, [&](const auto& m) {
        state = m.accumulate(m.reframe(state, frame), e), weight = m.weight(e, frame);
      });
      sum.add(float(m.rescale(before, frame)), float(weight) * factor_of_weight(scores, at),
              WarpRow::read(v, j));
      if (M::kNormalized ? isnan(m.mass(state)) : sum.is_lost(p.payload.size[3])) break;
    }
    WarpRow out = WarpRow::zero();
    const R mass = M::kNormalized ? m.mass(state) : R(1);
    if (mass != R(0)) out.add(1.f, float(R(1) / mass), sum);
    if (p.out_bias.data) out.add(1.f, 1.f, WarpRow::read(Matrix<float>(p.out_bias, 0, 0), 0));
    const Matrix<float> high(p.out, batch, head);
    out.write(high, row);
    if (p.low.data) out.write_low(Matrix<float>(p.low, batch, head), high, row);
    if (threadIdx.x % kWarp == 0) rows.store(flat, m.project(state));
  };
  // A warp looks at 32 rows at a time, and mostly finds none marked.
  for (std::int64_t first = warp_of_grid() * kWarp; first < all; first += warps_of_grid() * kWarp) {
    const std::int64_t own = first + threadIdx.x % kWarp;
    unsigned marked = __ballot_sync(0xffffffffu, own < all && rows.marked(own));
    for (; marked; marked &= marked - 1) repair_row(first + __ffs(marked) - 1);
  }
}

// Recomputes the gradients of marked rows and columns.
template <class M, class Rows, class Policy = Score<float>>
__global__ void __launch_bounds__(kRepairThreads)
    repair_backward_kernel(const __grid_constant__ RepairArguments p, const __grid_constant__ M m,
                           const __grid_constant__ Policy score, const __grid_constant__ Rows rows,
                           const __grid_constant__ RowMarks marks) {
  static_assert(PayloadMonoid<M> && ProductSource<Rows, M>);
  const std::int64_t heads = p.rows.size[1], row_count = p.rows.size[2], column_heads = p.columns.size[1],
                     columns = p.columns.size[2], group = heads / column_heads;
  struct Pulled {
    float score, dot, weight;  // derivatives with respect to the score and the dot product; of the payload
  };
  const auto pull_one = [&](const auto& scores, std::int64_t flat_row, std::int64_t row, std::int64_t column,
                            const WarpRow& a, const WarpRow& g, const WarpRow& b, const WarpRow& v) {
    const float dot = a.dot(b);
    const auto at = scores.at(row, column);
    const Element<float> e{at.value(dot), 0.f, 0, -1};
    const float factor = factor_of_weight(scores, at), u = g.dot(v) * factor;
    PayloadPull<float> pulled;
    with_named(
        m, [&](const auto& m) { pulled = pull(m, e, rows.product(flat_row), rows.upstream(flat_row), u); });
    return Pulled{pulled.score, at.chain(pulled.score, dot) * p.scale, pulled.weight * factor};
  };
  const auto repair_row = [&](std::int64_t batch, std::int64_t head, std::int64_t row) {
    const Matrix<float> columns_of(p.columns, batch, head / group), payload(p.payload, batch, head / group);
    const WarpRow a = WarpRow::read(Matrix<float>(p.rows, batch, head), row);
    const WarpRow g = WarpRow::read(Matrix<float>(p.grad_out, batch, head), row);
    const Matrix<float> d_bias(p.d_bias, batch, head);
    const auto scores = scores_to_repair(score, p.bias, batch, head);
    WarpRow d_row = WarpRow::zero();
#pragma unroll 1
    for (std::int64_t j = p.range.begin(row); j < p.range.end(row, columns); ++j) {
      if (!keeps(scores, row, j)) continue;
      const WarpRow b = WarpRow::read(columns_of, j), v = WarpRow::read(payload, j);
      const std::int64_t flat_row = (batch * heads + head) * row_count + row;
      const Pulled pulled = pull_one(scores, flat_row, row, j, a, g, b, v);
      d_row.add(1.f, pulled.dot, b);
      if (p.d_bias.data && threadIdx.x % kWarp == 0) d_bias.write(row, j, pulled.score);
      if (p.d_bias.data == nullptr && d_row.is_lost(p.rows.size[3])) break;
    }
    d_row.write(Matrix<float>(p.d_rows, batch, head), row);
  };
  const auto repair_column = [&](std::int64_t batch, std::int64_t column_head, std::int64_t column) {
    const WarpRow b = WarpRow::read(Matrix<float>(p.columns, batch, column_head), column);
    const WarpRow v = WarpRow::read(Matrix<float>(p.payload, batch, column_head), column);
    WarpRow d_column = WarpRow::zero(), d_payload = WarpRow::zero();
    float d_bias = 0.f;
#pragma unroll 1
    for (std::int64_t head = column_head * group; head < (column_head + 1) * group; ++head) {
      const Matrix<float> rows_of(p.rows, batch, head), grads(p.grad_out, batch, head);
      const auto scores = scores_to_repair(score, p.bias, batch, head);
#pragma unroll 1
      for (std::int64_t row = 0; row < row_count; ++row) {
        if (column < p.range.begin(row) || column >= p.range.end(row, columns) || !keeps(scores, row, column))
          continue;
        const WarpRow a = WarpRow::read(rows_of, row), g = WarpRow::read(grads, row);
        const Pulled pulled =
            pull_one(scores, (batch * heads + head) * row_count + row, row, column, a, g, b, v);
        d_column.add(1.f, pulled.dot, a);
        d_payload.add(1.f, pulled.weight, g);
        d_bias += pulled.score;
        const bool bias_is_lost = p.d_column_bias == nullptr || isnan(d_bias);
        if (bias_is_lost && d_column.is_lost(p.rows.size[3]) && d_payload.is_lost(p.payload.size[3])) break;
      }
    }
    d_column.write(Matrix<float>(p.d_columns, batch, column_head), column);
    d_payload.write(Matrix<float>(p.d_payload, batch, column_head), column);
    if (p.d_column_bias && threadIdx.x % kWarp == 0) p.d_column_bias[column] = d_bias;
  };
  // A warp looks at one mark at a time, which stands for RowMarks::kUnit rows or columns.
  const std::int64_t row_marks = p.rows.size[0] * heads * marks.row_units;
  const std::int64_t column_marks = p.rows.size[0] * column_heads * marks.column_units;
  for (std::int64_t n = warp_of_grid(); n < row_marks; n += warps_of_grid()) {
    if (marks.rows[n] == 0.f) continue;
    const std::int64_t batch_head = n / marks.row_units, first = n % marks.row_units * RowMarks::kUnit;
#pragma unroll 1
    for (std::int64_t row = first; row < first + RowMarks::kUnit && row < row_count; ++row)
      repair_row(batch_head / heads, batch_head % heads, row);
  }
  for (std::int64_t n = warp_of_grid(); n < column_marks; n += warps_of_grid()) {
    if (marks.columns[n] == 0.f) continue;
    const std::int64_t batch_head = n / marks.column_units, first = n % marks.column_units * RowMarks::kUnit;
#pragma unroll 1
    for (std::int64_t column = first; column < first + RowMarks::kUnit && column < columns; ++column)
      repair_column(batch_head / column_heads, batch_head % column_heads, column);
  }
}

}  // namespace monoidreduce
