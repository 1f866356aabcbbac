// The VJP (vector-Jacobian product) of one element. Every backward pass consists of these. Here it is called `pull`.
#pragma once

#include "monoidreduce/monoid.h"

namespace monoidreduce {

// Without a payload: the derivative of the loss with respect to each score. The derivative of the score with respect to
// its dot product is applied later (Score::slope).
template <Monoid M>
MR_HD Gradient<typename M::Real> pull(const M& m, const Element<typename M::Real>& e,
                                      const typename M::Output& product,
                                      const typename M::Upstream& upstream) {
  return m.local_gradient(e, product, upstream);
}

// With a payload. G_i is the upstream gradient of out_i, g_i that of P_i; v_j is the payload.
//
//   u           = <G_i, v_j>
//   c           = g_i - <G_i, out_i>       for a normalized monoid; else g_i. RowPolicy::upstream returns c.
//   d_score     = D(P_i, X_ij) (u + c)     PayloadPull::score
//   d_payload_j += weight G_i              PayloadPull::weight
//
// For attention, <G_i, out_i> is FlashAttention's delta, rowsum(dO * O). The code calls c the row's centre: g_lse - delta.
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

// An element's contribution to the weighted mean of the u_j, which equals <G_i, out_i> (delta). A mean of the same u_j has
// their rounding errors, which u_j - mean then cancels, as in an eager softmax. This matters in rows of few columns, whose
// weights are large. If only P_i has an upstream gradient, every u is 0. The contribution is then 0 too, even where a +inf
// score makes the weight NaN.
template <PayloadMonoid M>
MR_HD typename M::Real delta_term(const M& m, const Element<typename M::Real>& e,
                                  const typename M::Output& product, typename M::Real u) {
  using R = typename M::Real;
  return select(u == R(0), R(0), m.share(e, product) * u);
}

}  // namespace monoidreduce
