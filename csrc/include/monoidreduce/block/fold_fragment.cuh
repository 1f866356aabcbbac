// A monoid's fold, lifted from one element to a warpgroup's fragment of scores.
#pragma once

#include <cmath>
#include <type_traits>

#include "monoidreduce/block/fragment.cuh"
#include "monoidreduce/monoid.h"
#include "monoidreduce/warp/lanes.cuh"

namespace monoidreduce {

inline constexpr int kLanesOfRow = 4;

// The columns of a tile that a row keeps: [begin, begin + count), from the thread's first column.
struct Kept {
  int begin;
  unsigned count;
  __device__ __forceinline__ bool operator()(int i) const {
    return static_cast<unsigned>(i / 4 * 8 + i % 2 - begin) < count;
  }
};

// Replaces the scores (or dot products, where scores grow with them) that are not kept by one that adds nothing. A
// monoid that has no such score is only given columns that every row keeps, and columns beyond the last, whose payload
// is 0.
template <PayloadMonoid M, int kSize>
__device__ __forceinline__ void mask_fragment(const M& m, const Kept (&kept)[2], float (&tile)[kSize]) {
  if constexpr (requires { m.absent(); }) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (!kept[row_of_element(i)](i)) tile[i] = m.absent().x;
    }
  }
}

// Elements that are not kept become 0.
template <int kSize>
__device__ __forceinline__ void clear_fragment(const Kept (&kept)[2], float (&tile)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (!kept[row_of_element(i)](i)) tile[i] = 0.f;
  }
}

// Are all elements of the calling thread finite.
template <int kSize>
__device__ __forceinline__ bool is_finite(const float (&tile)[kSize]) {
  float probe = 0.f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) probe += tile[i] * 0.f;
  return probe == 0.f;
}

// Turns a tile into weights in the frames of its rows, and adds their mass. kScored: does the tile hold scores, or dot
// products still.
template <bool kScored, PayloadMonoid M, class Scores, int kSize>
__device__ __forceinline__ void weigh_fragment(const M& m, typename M::State (&state)[2],
                                               float (&tile)[kSize], const Scores& scores) {
  using R = typename M::Real;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    typename M::State& row = state[row_of_element(i)];
    const Element<R> e{kScored ? R(tile[i]) : scores.value(R(tile[i]), i), R(0), 0, -1};
    tile[i] = m.weight(e, m.frame_of(row)).x;
    row = m.accumulate(row, e);
  }
}

// Folds a tile into the states of the thread's two rows and turns it into the payload's weights. A state holds the
// mass of the thread's own columns, in the frame of the whole row. scale: what the payload sums so far must be
// multiplied by.
//
// Scores: fragment_scores.cuh. Where scores grow with dot products, the largest dot product has the frame of the row, and a
// score is not rounded before the frame is taken from it: one multiply-add does both.
template <PayloadMonoid M, class Scores, int kSize>
__device__ __forceinline__ void fold_fragment(const M& m, typename M::State (&state)[2], float (&tile)[kSize],
                                              const Scores& scores, typename M::Real (&scale)[2]) {
  using R = typename M::Real;
  bool far = false;
  if constexpr (!std::is_empty_v<typename M::Frame>) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      float& top = largest[row_of_element(i)];
      top = fmaxf(top, tile[i]);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const R dot(reduce_lanes<kLanesOfRow>(largest[row], [](float a, float b) { return fmaxf(a, b); }));
      const R top = scores.rounded(dot);
      const auto before = m.frame_of(state[row]);
      const auto frame = m.join(before, m.frame(Element<R>{top, R(0), 0, -1}));
      scale[row] = m.rescale(before, frame);
      state[row] = m.reframe(state[row], frame);
      // The frame is rounded and the scores in the multiply-add are not. From here on that matters.
      constexpr float kFar = 1 << 22;
      far |= fabsf(top.x) >= kFar && top.x != -INFINITY;
    }
  }
  if constexpr (Scores::kMonotone) {
    if (__any_sync(0xffffffffu, far)) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) tile[i] = scores.rounded(R(tile[i])).x;
      weigh_fragment<true>(m, state, tile, scores);
    } else {
      weigh_fragment<false>(m, state, tile, scores);
    }
  } else {
    weigh_fragment<true>(m, state, tile, scores);
  }
}

}  // namespace monoidreduce
