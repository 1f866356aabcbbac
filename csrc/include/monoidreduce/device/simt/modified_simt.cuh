// Attention whose scores functions modify, and attend, on any GPU, of any element type, width and strides: what NVRTC
// compiles fold_forward and fold_backward with. score_element.h describes the functions; Real is float or
// double here.
#pragma once

#include <type_traits>

#include "monoidreduce/device/program/score_element.h"
#include "monoidreduce/device/simt/fold_backward_simt.cuh"
#include "monoidreduce/device/simt/fold_forward_simt.cuh"
#include "monoidreduce/monoids/sum.h"

namespace monoidreduce {

// Of a call; the same for all functions. scale: of dot products, in the type that they are summed in.
template <class R>
struct ProgramScoresData {
  static constexpr bool bias_inside = false;  // as of Score: there is no bias
  ModifiedScoresData call;
  R scale;
};
template <class P>
struct ProgramScores : ProgramScoresData<typename P::Real> {};

template <class P>
struct ProgramScoresOfHead {
  using R = typename P::Real;
  using I = Index<R>;
  const ProgramScores<P>& score;
  int batch, head;

  struct At {
    const ProgramScoresOfHead& of;
    I query, position;

    // The product is rounded, as no sum may be fused with it in one pass alone.
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
    // An absent score has g = 0, and its slope may not be finite.
    __device__ R chain(R g, R dot) const { return select(g == R(0), g, g * P::slope(element(dot))); }
  };
  __device__ At at(std::int64_t row, std::int64_t column) const {
    return {*this, static_cast<I>(row), static_cast<I>(column)};
  }
  __device__ bool touches(std::int64_t row0, std::int64_t column0) const {
    return score.call.blocks == nullptr ||
           score.call.touches(batch, head, static_cast<int>(row0), kTile, static_cast<int>(column0), kTile);
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

// RowPolicy of attention. centre, grad_lse: of row_centre; backward alone. sinks: [heads], or null; forward alone.
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
  MR_HD R of_product(std::int64_t row) const { return grad_lse[row]; }
};
// Of attend: the payload's sum is all that there is.
template <class R>
struct WeightRows : SoftmaxRows<R> {
  MR_HD void store(std::int64_t, R) const {}
  MR_HD R product(std::int64_t) const { return R(0); }
  MR_HD R upstream(std::int64_t) const { return R(0); }
};

// The host passes the same arguments to both.
static_assert(std::is_empty_v<Sum<float>> && std::is_empty_v<LogSumExp<float>>);
static_assert(sizeof(WeightRows<float>) == sizeof(SoftmaxRows<float>));

}  // namespace monoidreduce
