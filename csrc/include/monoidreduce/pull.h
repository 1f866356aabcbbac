// The VJP of one element, which every backward pass is made of.
#pragma once

#include "monoidreduce/monoid.h"

namespace monoidreduce {

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
