// A monoid's pull (pull.h: the VJP of one element) for a fragment, instead of single elements.
#pragma once

#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/pull.h"
#include "monoidreduce/traits.h"

namespace monoidreduce {

// What the backward pass knows of a row.
template <class M>
struct RowResidual {
  typename M::Output product;  // P_i
  // RowPolicy::upstream (for attention -delta, plus grad_lse); -0 if there is none, because the compiler
  // removes an addition of -0.
  typename M::Upstream upstream{-0.f};
};

// The default `see` of pull_fragment.
struct Unseen {
  __device__ __forceinline__ void operator()(int, float) {}
};

// x, or 0 if element i's weight is dropped. A function of its own, as the next: the NVRTC of CUDA 12.4 looks
// for members in an `if constexpr` of a generic lambda even where it is false.
template <class Scores>
__device__ __forceinline__ float kept_or_0(const Scores& scores, int i, float x) {
  if constexpr (DropsWeights<Scores>) return scores.drops(i) ? 0.f : x;
  return x;
}
// The scores' unit() for <G_i, v_j>, with the factor of the weights that are kept, if some are dropped.
template <class R, class Scores>
__device__ __forceinline__ R unit_of_kept(const Scores& scores) {
  if constexpr (DropsWeights<Scores>) return scores.unit() * R(scores.kept_factor());
  return scores.unit();
}

// Backward for a fragment that Scores::prepare or prepare_transposed has prepared. `tile` becomes the
// payload's weights (for attention, p). `u`, on entry <G_i, v_j> (for attention, dP), becomes the derivative
// with respect to the dot product (dS times the scale). Weights that are kept lack their factor (dropout),
// which the caller gives their sums (keep_sums). residual(i) is the RowResidual of element i's row.
// see(i, g) receives the derivative with respect to score i.
//
// The local gradient is linear in the upstream gradient. So the scores' unit() (their scale) multiplies u
// here, and the row's part of it before.
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
      const R scaled = R(kept_or_0(scores, i, u[i])) * unit_of_kept<R>(scores);
      const PayloadPull<R> pulled = pull(m, e, row.product, row.upstream, scaled);
      see(i, pulled.score.x);
      u[i] = scores.chain(pulled.score, x, i).x;
      tile[i] = kept_or_0(scores, i, pulled.weight.x);
    }
  });
}

// The same, where scores may read tables whose gradient is wanted: then that is summed, and `see` is not
// called. rows: of the fold. kept: the rows that the thread's columns keep. A function of its own, as
// kept_or_0 is.
template <PayloadMonoid M, PulledScores<M> Scores, class Residual, int kSize, class See>
__device__ __forceinline__ void pull_fragment(const M& m, const Scores& scores, const Residual& residual,
                                              float (&tile)[kSize], float (&u)[kSize], int rows,
                                              const Kept (&kept)[2], See&& see) {
  if constexpr (HasTableGradient<Scores>) {
    auto sums = scores.table_gradient(tile, rows, kept);
    pull_fragment(m, scores, residual, tile, u, sums);
    sums.finish();
  } else {
    pull_fragment(m, scores, residual, tile, u, see);
  }
}

}  // namespace monoidreduce
