// Attention with functions of its scores (score_mod, mask_mod), and attend, on any GPU, for any element type,
// width and strides: with this, NVRTC compiles fold_forward and fold_backward. score_element.h describes the
// functions; here their Real is float or double.
#pragma once

#include <type_traits>

#include "monoidreduce/device/program/score_element.h"
#include "monoidreduce/device/simt/fold_backward_simt.cuh"
#include "monoidreduce/device/simt/fold_forward_simt.cuh"
#include "monoidreduce/device/simt/lane_table_gradient.cuh"
#include "monoidreduce/monoids/sum.h"

namespace monoidreduce {

// The data of a call; the same type for all functions. scale: of dot products, in the type in which they are
// summed.
template <class R>
struct ProgramScoresData {
  static constexpr bool bias_inside = false;  // as in Score: there is no bias
  ModifiedScoresData call;
  R scale;
};
template <class P>
struct ProgramScores : ProgramScoresData<typename P::Real> {};

template <class P>
struct ProgramScoresOfHead {
  using R = typename P::Real;
  using I = Index<R>;
  static constexpr bool kDropsWeights = kDrops<P>, kHasTableGradient = kGathers<P> > 0;
  const ProgramScores<P>& score;
  int batch, head;

  struct At {
    const ProgramScoresOfHead& of;
    I query, position;

    // The product is rounded by itself, so that it is not fused with a sum in one pass and left alone in the
    // other.
    __device__ ScoreElement<R> element(R dot) const {
      return {multiply_add(dot, of.score.scale, R(-0.f)),
              of.batch,
              of.head,
              query,
              position,
              R(query),
              R(position),
              R(position - query),
              of.score.call.tables,
              of.score.call.size};
    }
    __device__ R value(R dot) const { return P::score(element(dot)); }
    // What the weight is multiplied by.
    __device__ R factor() const {
      const auto e = element(R(0));
      return select(P::drops(e), R(0), P::kept_factor(e));
    }
    // A masked score has g = 0, but its slope may not be finite.
    __device__ R chain(R g, R dot) const { return select(g == R(0), g, g * P::slope(element(dot))); }
  };
  __device__ At at(std::int64_t row, std::int64_t column) const {
    return {*this, static_cast<I>(row), static_cast<I>(column)};
  }
  __device__ bool touches(std::int64_t row0, std::int64_t column0) const {
    return score.call.blocks == nullptr ||
           score.call.touches(batch, head, static_cast<int>(row0), kTile, static_cast<int>(column0), kTile);
  }
  __device__ auto table_gradient() const {
    return simt::LaneTableGradient<P, R>{TableEntries<P::kTableSum, R>(score.call)};
  }
  __device__ bool masks() const { return P::kMasked; }
  __device__ bool keeps(std::int64_t row, std::int64_t column) const {
    return P::keeps(at(row, column).element(R(0)));
  }
};
template <class P>
__device__ __forceinline__ ProgramScoresOfHead<P> scores_of_head(const ProgramScores<P>& score, const Tensor&,
                                                                 std::int64_t batch, std::int64_t head) {
  return {score, static_cast<int>(batch), static_cast<int>(head)};
}

// The row policy of attention. centre (grad_lse - delta) and grad_lse come from row_centre; backward only.
// sinks: [heads], or null; forward only.
template <class R>
struct SoftmaxRows {
  R *lse, *lse_low;  // [rows], natural logarithm
  const R *centre = nullptr, *grad_lse = nullptr, *sinks = nullptr;

  MR_HD bool active(std::int64_t) const { return true; }
  MR_HD std::int64_t label(std::int64_t) const { return -1; }
  MR_HD bool has_sinks() const { return sinks != nullptr; }
  MR_HD R sink(std::int64_t head) const { return sinks[head]; }
  MR_HD void store(std::int64_t row, LogNumber<R> p) const { lse[row] = p.high, lse_low[row] = p.low; }
  MR_HD LogNumber<R> product(std::int64_t row) const {
    return {softmax_product(lse[row], centre[row]), lse_low[row]};
  }
  MR_HD R upstream(std::int64_t row) const { return centre[row]; }
  MR_HD R product_gradient(std::int64_t row) const { return grad_lse[row]; }
};
// The row policy of attend: of a row there is only the payload's sum.
template <class R>
struct WeightRows : SoftmaxRows<R> {
  MR_HD void store(std::int64_t, R) const {}
  MR_HD R product(std::int64_t) const { return R(0); }
  MR_HD R upstream(std::int64_t) const { return R(0); }
};

// The host launches attention and attend with the same kernel arguments, so the types must have the same
// size.
static_assert(std::is_empty_v<Sum<float>> && std::is_empty_v<LogSumExp<float>>);
static_assert(sizeof(WeightRows<float>) == sizeof(SoftmaxRows<float>));

}  // namespace monoidreduce
