// A fold problem as plain data, the input of both engines (cpu/fold.h, kernel/*.cuh). Nothing here owns memory.
//
//   X_ij  = score(<a_i, b_j>, bias_ij)         for the columns j in range of row i
//   P_i   = fold_j lift(X_ij)
//   out_i = sum_j weight_ij payload_j          with a payload; divided by the mass where the monoid is normalized
//
// Rows are [batch, heads, rows], columns [batch, column heads, columns]. Several query heads may share one column
// head (grouped-query attention): heads / column heads of them. Row statistics and accumulation are float, or
// double for float64 tensors.
#pragma once

#include <concepts>
#include <cstdint>

#include "monoidreduce/monoid.h"
#include "monoidreduce/score.h"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

struct FoldProblem {
  TensorView a;        // [B, H, M, F]
  TensorView b;        // [B, Hc, N, F]
  // [B, H, M, E] [B, Hc, N, E]: operands of the second score; absent unless the monoid has two scores.
  TensorView other_a = {}, other_b = {};
  TensorView payload = {};  // [B, Hc, N, D]  or absent
  // [B, H, M, N], stride 0 where broadcast; floating, or bool (false excludes an element); or absent.
  TensorView bias = {};
  TensorView out_bias = {};  // [D]            added to the payload's fold; or absent
  ScoreOptions score = {};
  ColumnRange range = {};
  bool whole = true;  // backward: the columns are all that P_i was folded over; false: a slice of them
  // [M + 1] int64, or absent; only with one batch and one head. The active rows, then the others, and last the
  // number of active rows.
  TensorView order = {};
  // A problem may hold only a part of the ordered rows: the places from first_place on. places is then the number
  // of all rows; 0 means that the problem holds them all.
  std::int64_t first_place = 0, places = 0;

  std::int64_t batch() const { return a.size[0]; }
  std::int64_t heads() const { return a.size[1]; }
  std::int64_t column_heads() const { return b.size[1]; }
  std::int64_t rows() const { return a.size[2]; }
  std::int64_t all_rows() const { return places == 0 ? rows() : places; }
  std::int64_t columns() const { return b.size[2]; }
  std::int64_t width() const { return a.size[3]; }
  std::int64_t other_width() const { return other_a.present() ? other_a.size[3] : 0; }
  std::int64_t payload_width() const { return payload.present() ? payload.size[3] : 0; }
};

// The gradients of a fold. A gradient that is absent is not computed.
// Both engines add to d_bias, in the accumulation type. The CPU engine writes the others, in their own type; the GPU
// engine adds to them in the accumulation type.
struct FoldGradients {
  TensorView grad_out;   // [B, H, M, D]   upstream gradient of out; absent where there is no payload
  TensorView d_a;        // [B, H, M, F]
  TensorView d_b;        // [B, Hc, N, F]
  TensorView d_other_a;  // [B, H, M, E]
  TensorView d_other_b;  // [B, Hc, N, E]
  TensorView d_payload;  // [B, Hc, N, D]
  TensorView d_bias;     // [B, H, M, N]   stride 0 where the bias was broadcast
};

// The size of a tile of scores that an engine computes at a time.
struct TileSize {
  std::int64_t rows, columns;
};

// What an operator defines for each of its rows. row is the flat index over [B, H, M].
template <class P, class M>
concept RowPolicy = requires(const P p, std::int64_t row, typename M::Output output) {
  // Backward skips a row that is not active: all its gradients are 0.
  { p.active(row) } -> std::same_as<bool>;
  { p.label(row) } -> std::same_as<std::int64_t>;  // Element::label
  p.store(row, output);  // forward: store P_i, and the operator's results made of it
  { p.product(row) } -> std::same_as<typename M::Output>;  // backward: P_i
  // Backward: the gradient with respect to P_i (with a payload, see pull()).
  { p.upstream(row) } -> std::same_as<typename M::Upstream>;
};

// A row policy that also knows g_i, the gradient with respect to P_i without the part of the payload (see pull()).
template <class P, class M>
concept KnowsProductGradient = PayloadMonoid<M> && M::kNormalized && requires(const P p, std::int64_t row) {
  { p.of_product(row) } -> std::same_as<typename M::Real>;
};

// The VJP of one element without a payload: the derivative with respect to each score. The slope of the score with
// respect to its dot product is applied later.
template <Monoid M>
MR_HD Gradient<typename M::Real> pull(const M& m, const Element<typename M::Real>& e,
                                      const typename M::Output& product,
                                      const typename M::Upstream& upstream) {
  return m.local_gradient(e, product, upstream);
}

// The VJP of one element with a payload. G_i is the upstream gradient of out_i, g_i that of P_i.
//
//   u           = <G_i, v_j>
//   c           = g_i - <G_i, out_i>       for a normalized monoid; else g_i. RowPolicy::upstream returns c.
//   d_payload_j += weight G_i
//
// For attention, <G_i, out_i> is the delta of FlashAttention: rowsum(dO * O).
template <class R>
struct PayloadPull {
  R score, weight;
};
template <PayloadMonoid M>
MR_HD PayloadPull<typename M::Real> pull(const M& m, const Element<typename M::Real>& e,
                                         const typename M::Output& product, const typename M::Upstream& c,
                                         typename M::Real u) {
  return {m.local_gradient(e, product, u + c).score, m.share(e, product)};
}

// The contribution of an element to the weighted mean of the u_j, which equals <G_i, out_i>. Computed from the same u_j,
// the mean has their rounding errors, and u_j - mean cancels them, as in an eager softmax. That matters in rows of few
// columns, whose weights are large. Where only P_i has a gradient, every u is 0, and so is the contribution, even if a
// +inf score makes the weight NaN.
template <PayloadMonoid M>
MR_HD typename M::Real share_of_mean(const M& m, const Element<typename M::Real>& e,
                                     const typename M::Output& product, typename M::Real u) {
  using R = typename M::Real;
  return select(u == R(0), R(0), m.share(e, product) * u);
}

}  // namespace monoidreduce
