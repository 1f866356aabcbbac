// A monoid's pull, lifted from one element to a warpgroup's fragment.
#pragma once

#include "monoidreduce/block/fragment.cuh"
#include "monoidreduce/fold.h"

namespace monoidreduce {

// What the backward pass knows of a row of the fold.
template <class M>
struct RowResidual {
  typename M::Output product;  // P_i
  // RowPolicy::upstream. -0 where there is none: to add it takes no instruction.
  typename M::Upstream upstream{-0.f};
};

struct Unseen {
  __device__ __forceinline__ void operator()(int, float) {}
};

// What Scores::prepare or prepare_transposed (fragment_scores.cuh) left becomes the payload's weights, and u = <G_i, v_j> the
// derivative by the dot product. residual(i): RowResidual of the row of element i. D is linear in the upstream gradient, so the
// unit of the scores goes into u and, beforehand, into the row's part. see(i, g): is shown the derivative by score i.
template <PayloadMonoid M, class Scores, class Residual, int kSize, class See = Unseen>
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
      u[i] = scores.chain(pulled.score, x).x;
      tile[i] = pulled.weight.x;
    }
  });
}

}  // namespace monoidreduce
