// A fold problem as plain data: what both engines (cpu/fold.h, kernel/*.cuh) take. Nothing here owns memory.
//
//   X_ij  = score(<a_i, b_j>, bias_ij)      for the columns j in range of row i
//   P_i   = fold_j lift(X_ij)               and, with a payload, out_i = sum_j weight_ij payload_j (divided
//   by the mass)
//
// Rows are [batch, heads, rows], columns [batch, column heads, columns]; heads / column heads query heads
// share a column head (grouped-query attention). Row statistics and accumulation are float, or double for
// float64 tensors.
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
  TensorView other_a;  // [B, H, M, E]   second score; absent unless the monoid has two
  TensorView other_b;  // [B, Hc, N, E]
  TensorView payload;  // [B, Hc, N, D]  or absent
  TensorView bias;  // [B, H, M, N]   stride 0 where broadcast; floating, or bool (false excludes); or absent
  TensorView out_bias;  // [D]            added to the payload's fold; or absent
  ScoreOptions score;
  ColumnRange range;
  bool whole = true;  // backward: are these all columns that the rows' products are of, or a slice of them
  TensorView order =
      {};  // [M + 1] int64, of one batch and head: the rows that count, the others, and how many count; or absent
  // Where rows with an order come in parts, these are the places from the first one on, of so many; 0: all.
  std::int64_t first_place = 0, places = 0;
  // Of gathered rows: where they lie. These are read instead if all rows count, which the device knows, and nothing is gathered.
  TensorView ungathered_a = {}, ungathered_other_a = {};
  TensorView ungathered_b = {};  // the same of b, where the order is one of the width

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

// Where the gradients of a fold go. Absent: not wanted, not computed.
// d_bias is accumulated into, in the accumulation type. The others are written by the CPU engine, in their own
// type; the GPU engine accumulates into them in the accumulation type.
struct FoldGradients {
  TensorView grad_out;   // [B, H, M, D]   upstream of the payload output; absent where there is no payload
  TensorView d_a;        // [B, H, M, F]
  TensorView d_b;        // [B, Hc, N, F]
  TensorView d_other_a;  // [B, H, M, E]
  TensorView d_other_b;  // [B, Hc, N, E]
  TensorView d_payload;  // [B, Hc, N, D]
  TensorView d_bias;     // [B, H, M, N]   stride 0 where the bias was broadcast
};

// The scores that an engine computes at a time.
struct TileSize {
  std::int64_t rows, columns;
};

// What an operator knows about its rows, by flat row index over [B, H, M]; T is float or double.
template <class P, class M>
concept RowPolicy = requires(const P p, std::int64_t row, typename M::Output output) {
  {
    p.active(row)
  } -> std::same_as<bool>;  // backward skips a row that is not active: all its gradients are 0
  { p.label(row) } -> std::same_as<std::int64_t>;  // Element::label
  p.store(row, output);                            // forward: keep P_i, and what the operator makes of it
  { p.product(row) } -> std::same_as<typename M::Output>;  // backward: P_i
  {
    p.upstream(row)
  } -> std::same_as<typename M::Upstream>;  // backward: the gradient by P_i (with a payload, see pull())
};

// One that knows g_i, the gradient by P_i alone, beside the c_i of a payload (see pull()).
template <class P, class M>
concept KnowsProductGradient = PayloadMonoid<M> && M::kNormalized && requires(const P p, std::int64_t row) {
  { p.of_product(row) } -> std::same_as<typename M::Real>;
};

// One element of a backward pass without a payload: the derivative by each dot product, before the score's
// own slope.
template <Monoid M>
MR_HD Gradient<typename M::Real> pull(const M& m, const Element<typename M::Real>& e,
                                      const typename M::Output& product,
                                      const typename M::Upstream& upstream) {
  return m.local_gradient(e, product, upstream);
}

// With a payload: u = <G_i, v_j>, and c = g_i - <G_i, out_i> for a normalised monoid, g_i for one that is not
// (RowPolicy::upstream returns c). The weight takes G_i to the payload's gradient: d_payload_j += weight G_i.
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

// What an element adds to the mean of the u_j. c_i = g_i - that mean is g_i - <G_i, out_i>, but cancels with the rounding
// errors of the u_j, as where eager composition keeps the weights: of few columns, whose shares are large, this shows.
// Where nothing but P_i has a gradient all u_j are 0, and so is the mean, whatever a +inf score makes of a share.
template <PayloadMonoid M>
MR_HD typename M::Real share_of_mean(const M& m, const Element<typename M::Real>& e,
                                     const typename M::Output& product, typename M::Real u) {
  using R = typename M::Real;
  return select(u == R(0), R(0), m.share(e, product) * u);
}

}  // namespace monoidreduce
