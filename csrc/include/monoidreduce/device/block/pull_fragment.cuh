// A monoid's pull (pull.h) of a warpgroup's fragment, in place of single elements.
#pragma once

#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/pull.h"
#include "monoidreduce/traits.h"

namespace monoidreduce {

// The data of a row in the backward pass.
template <class M>
struct RowResidual {
  typename M::Output product;  // P_i
  // RowPolicy::upstream; -0 if there is none, because the compiler removes an addition of -0.
  typename M::Upstream upstream{-0.f};
};

struct Unseen {
  __device__ __forceinline__ void operator()(int, float) {}
};

// Turns a fragment that Scores::prepare or prepare_transposed has prepared into the payload's weights. Turns
// u = <G_i, v_j> into the derivative with respect to the dot product. residual(i) is the RowResidual of
// element i's row. see(i, g) receives the derivative with respect to score i.
//
// D is linear in the upstream gradient. So the unit of the scores multiplies u here, and the row's part beforehand.
template <PayloadMonoid M, PulledScores<M> Scores, class Residual, int kSize, class See = Unseen>
__device__ __forceinline__ void pull_fragment(const M& m, const Scores& scores, const Residual& residual,
                                              float (&tile)[kSize], float (&u)[kSize], See&& see = {}) {
  using R = typename M::Real;
  with_named(m, [&](const auto& m) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const R x(tile[i]);
      const Element<R> e{scores.value(x, i), R(0), 0, -1};
      const auto row = residual(i);
      const PayloadPull<R> pulled = pull(m, e, row.product, row.upstream, R(u[i]) * scores.unit());
      see(i, pulled.score.x);
      u[i] = scores.chain(pulled.score, x, i).x;
      tile[i] = pulled.weight.x;
    }
  });
}

}  // namespace monoidreduce
