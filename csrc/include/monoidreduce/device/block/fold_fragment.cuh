// A monoid's fold of a fragment, a thread's part of a tile of scores, instead of single elements (online
// softmax of a tile).
#pragma once

#include <cmath>
#include <type_traits>

#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/traits.h"

namespace monoidreduce {

inline constexpr int kLanesOfRow = 4;  // lanes that share a row

// The columns of a tile that one row keeps (that are not masked): [begin, begin + count), counted from the
// thread's first column.
struct Kept {
  int begin;
  unsigned count;
  __device__ __forceinline__ bool operator()(int i) const {
    return static_cast<unsigned>(i / 4 * 8 + i % 2 - begin) < count;
  }
};

// Masks a tile: replaces the scores that a row does not keep (dot products, if the scores are kMonotone) by
// m.absent(), for softmax -inf. A monoid without such a score (TileMonoid) has no mask to apply: every row
// keeps all its columns, and those beyond the last have payload 0.
template <TileMonoid M, int kSize>
__device__ __forceinline__ void mask_fragment(const M& m, const Kept (&kept)[2], float (&tile)[kSize]) {
  if constexpr (MaskableMonoid<M>) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (!kept[row_of_element(i)](i)) tile[i] = m.absent().x;
    }
  }
}

// Sets the elements that a row does not keep to 0.
template <int kSize>
__device__ __forceinline__ void clear_fragment(const Kept (&kept)[2], float (&tile)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (!kept[row_of_element(i)](i)) tile[i] = 0.f;
  }
}

// Whether all elements of the calling thread are finite.
template <int kSize>
__device__ __forceinline__ bool is_finite(const float (&tile)[kSize]) {
  float probe = 0.f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) probe += tile[i] * 0.f;
  return probe == 0.f;
}

// Scores from this magnitude on must be rounded before the row max is subtracted. The row max is a rounded
// score; a score that is the product inside a multiply-add is not, and from here on the difference matters.
inline constexpr float kLargeScore = 1 << 22;

// Score policies that add an offset, the same for all elements that a thread has of a row.
template <class Scores>
concept OffsetScores = requires(const Scores s) { s.offset(0); };

// A score, rounded by itself: never fused with the subtraction of the row max.
template <class R, class Scores>
__device__ __forceinline__ R rounded_score(const Scores& scores, float x, int row) {
  if constexpr (OffsetScores<Scores>)
    return scores.rounded(R(x)) + scores.offset(row);
  else
    return scores.rounded(R(x));
}

// Finds the row max (`top`) of the thread's two rows over whole rows of the tile. Returns true if they are so
// large that all scores of the tile must be rounded (kLargeScore).
//
// Where scores grow with dot products (Scores::kMonotone), the tile holds dot products, and the largest one
// gives the row max (MonotoneMonoid). A score is then not rounded before the row max is subtracted: one
// multiply-add does both.
template <class R, class Scores, int kSize>
__device__ __forceinline__ bool find_row_max(R (&top)[2], const float (&tile)[kSize], const Scores& scores) {
  float largest[2] = {-INFINITY, -INFINITY};
  bool far = false;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    float& dot = largest[row_of_element(i)];
    dot = fmaxf(dot, tile[i]);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const R own = rounded_score<R>(scores, largest[row], row);
    top[row] = R(reduce_lanes<kLanesOfRow>(own.x, [](float a, float b) { return fmaxf(a, b); }));
    far |= fabsf(top[row].x) >= kLargeScore && top[row].x != -INFINITY;
  }
  return __any_sync(0xffffffffu, far);
}

// Moves the states of the thread's two rows to frames (for softmax, running row maxima) that hold the tile
// too. scale: the factor by which the payload sums so far must be multiplied. Returns true if the tile's
// scores must be rounded.
template <TileMonoid M, FragmentScores<M> Scores, int kSize>
__device__ __forceinline__ bool frame_fragment(const M& m, typename M::State (&state)[2],
                                               const float (&tile)[kSize], const Scores& scores,
                                               typename M::Real (&scale)[2]) {
  using R = typename M::Real;
  if constexpr (std::is_empty_v<typename M::Frame>) {
    return false;
  } else {
    R top[2];
    const bool far = find_row_max(top, tile, scores);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const auto before = m.frame_of(state[row]);
      const auto frame = m.join(before, m.frame(Element<R>{top[row], R(0), 0, -1}));
      scale[row] = m.rescale(before, frame);
      state[row] = m.reframe(state[row], frame);
    }
    return far;
  }
}

template <TileMonoid M, FragmentScores<M> Scores, int kSize>
__device__ __forceinline__ void weigh_elements(const M& m, typename M::State (&state)[2],
                                               float (&tile)[kSize], const Scores& scores) {
  using R = typename M::Real;
  with_named(m, [&](const auto& m) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      typename M::State& row = state[row_of_element(i)];
      const Element<R> e{scores.value(R(tile[i]), i), R(0), 0, -1};
      tile[i] = m.weight(e, m.frame_of(row)).x;
      row = m.accumulate(row, e);
    }
  });
}

// Replaces the scores of a tile by the payload's weights in the frames of their rows (softmax: exp(score -
// row max)), and adds their mass to the states. A state holds the mass of the thread's own columns only.
template <TileMonoid M, FragmentScores<M> Scores, int kSize>
__device__ __forceinline__ void weigh_fragment(const M& m, typename M::State (&state)[2],
                                               float (&tile)[kSize], const Scores& scores) {
  // The offset is subtracted from the frame once, instead of added to each score.
  if constexpr (OffsetScores<Scores>) {
    const typename M::Frame frame[2] = {m.frame_of(state[0]), m.frame_of(state[1])};
#pragma unroll
    for (int r = 0; r < 2; ++r) state[r] = m.measured_from(state[r], frame[r] - scores.offset(r));
    weigh_elements(m, state, tile, scores);
#pragma unroll
    for (int r = 0; r < 2; ++r) state[r] = m.measured_from(state[r], frame[r]);
  } else {
    weigh_elements(m, state, tile, scores);
  }
}

// Clears the weights of a tile that the scores drop, if they drop any (dropout).
template <class Scores, int kSize>
__device__ __forceinline__ void drop_weights(const Scores& scores, float (&weights)[kSize], int row0,
                                             int column0) {
  if constexpr (DropsWeights<Scores>) scores.drop(weights, row0, column0);
}
// Multiplies sums of weights by the factor of those that were not dropped. It is the same for all, so it costs
// nothing in the loop over tiles.
template <class Scores, int kSize>
__device__ __forceinline__ void keep_sums(const Scores& scores, float (&sums)[kSize]) {
  if constexpr (DropsWeights<Scores>) {
#pragma unroll
    for (float& sum : sums) sum *= scores.kept_factor();
  }
}

// Replaces dot products by rounded scores, where scores grow with dot products. Otherwise the tile holds
// scores already.
template <class R, class Scores, int kSize>
__device__ __forceinline__ void round_scores(float (&tile)[kSize], const Scores& scores) {
  if constexpr (Scores::kMonotone) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) tile[i] = rounded_score<R>(scores, tile[i], row_of_element(i)).x;
  }
}
// The policy for a tile after round_scores; `rounded` says whether that was called.
template <class Scores>
__device__ __forceinline__ decltype(auto) after_rounding(const Scores& scores, bool rounded) {
  if constexpr (Scores::kMonotone)
    return scores.of_scores(rounded);
  else
    return (scores);
}

// Folds a tile into the states of the thread's two rows and replaces it by the payload's weights. scale: as
// in frame_fragment.
template <TileMonoid M, FragmentScores<M> Scores, int kSize>
__device__ __forceinline__ void fold_fragment(const M& m, typename M::State (&state)[2], float (&tile)[kSize],
                                              const Scores& scores, typename M::Real (&scale)[2]) {
  if (frame_fragment(m, state, tile, scores, scale) && Scores::kMonotone) {
    round_scores<typename M::Real>(tile, scores);
    weigh_fragment(m, state, tile, after_rounding(scores, true));
  } else {
    weigh_fragment(m, state, tile, after_rounding(scores, false));
  }
}

// Folds a tile into the states of the thread's two rows, for folds without a payload, with one or two scores
// for each element. column0: the tile's first column. columns: how many there are in all. label: the label of
// each row, or -1. factor: the factor of each row.
template <MonotoneMonoid M, FragmentScores<M> Scores, int kSize>
__device__ __forceinline__ void accumulate_fragment(const M& m, typename M::State (&state)[2],
                                                    float (&tile)[M::kScores][kSize], const Scores& scores,
                                                    int column0, int columns, const int (&label)[2],
                                                    const typename M::Real (&factor)[2]) {
  using R = typename M::Real;
  constexpr int kColumns = kSize * 2, kOther = M::kScores - 1;
  const auto absent = [&](int i) { return column0 + fragment_column(i) >= columns; };
  const bool full = column0 + kColumns <= columns;
  if (!full) {
#pragma unroll
    for (int n = 0; n < M::kScores; ++n) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (absent(i)) tile[n][i] = -INFINITY;
      }
    }
  }
  R top[M::kScores][2];
  bool far = false;
#pragma unroll
  for (int n = 0; n < M::kScores; ++n) far |= find_row_max(top[n], tile[n], scores);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const Element<R> largest{top[0][row], top[kOther][row], 0, -1, factor[row]};
    state[row] = m.reframe(state[row], m.join(m.frame_of(state[row]), m.frame(largest)));
  }

  // Most tiles hold the label of no row: there no column is compared with a label, and column numbers are not
  // computed.
  const auto here = [&](int x) { return static_cast<unsigned>(x - column0) < kColumns; };
  if (!kReadsColumns<M> && full && !far && !__any_sync(0xffffffffu, here(label[0]) || here(label[1]))) {
    with_named(m, [&](const auto& m) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int r = row_of_element(i);
        state[r] = m.accumulate(state[r], {scores.value(R(tile[0][i]), i),
                                           scores.value(R(tile[kOther][i]), i), 0, -1, factor[r]});
      }
    });
  } else {
    with_named(m, [&](const auto& m) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int r = row_of_element(i);
        // Selects between two states: a branch for each element made kernels spill registers.
        const auto with =
            m.accumulate(state[r], {scores.rounded(R(tile[0][i])), scores.rounded(R(tile[kOther][i])),
                                    column0 + fragment_column(i), label[r], factor[r]});
        state[r] = absent(i) ? state[r] : with;
      }
    });
  }
}

}  // namespace monoidreduce
