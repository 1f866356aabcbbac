// Score policies of the tensor-core kernels: score.h for a fragment, its cases apart so that each costs only what it
// needs.
//
//   kMonotone      does the score grow with the dot product; then a fragment may hold dot products where scores are
//                  meant, an absent score is an absent dot product, and
//   value(dot, i)  is the score of element i of the fragment; it may fuse with what uses it
//   rounded(dot)   the same, as a number of its own
//   prepare(tile, column0)             dot products become what the fragment is to hold; column0: of the tile
//   prepare_transposed(tile, column0)  the same for the backward pass, whose fragments have columns for rows
//   unit()         derivative of the score in natural units by what chain() is the derivative by
//   chain(g, score)  from the derivative by the score
#pragma once

#include "monoidreduce/block/fragment.cuh"
#include "monoidreduce/score.h"

namespace monoidreduce {

// dot + bias of the column, of element type E; null for none.
template <class R, class E>
struct BiasedScores {
  static constexpr bool kMonotone = true;
  const E* bias;
  std::int64_t stride;
  int columns;
  __device__ __forceinline__ float bias_of(int column) const {
    return column < columns ? static_cast<float>(bias[column * stride]) : 0.f;
  }
  template <int kSize>
  __device__ __forceinline__ void prepare(float (&tile)[kSize], int column0) const {
    if (bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = bias_of(column0 + fragment_column(i + e));
        tile[i + e] += x, tile[i + e + 2] += x;
      }
    }
  }
  template <int kSize>
  __device__ __forceinline__ void prepare_transposed(float (&tile)[kSize], int column0) const {
    if (bias == nullptr) return;
    const float x[2] = {bias_of(column0 + fragment_row(0)), bias_of(column0 + fragment_row(1))};
#pragma unroll
    for (int i = 0; i < kSize; ++i) tile[i] += x[row_of_element(i)];
  }
  __device__ __forceinline__ R value(R score, int) const { return score; }
  __device__ __forceinline__ R rounded(R score) const { return score; }
  __device__ __forceinline__ R unit() const { return R(1); }
  __device__ __forceinline__ R chain(R g, R) const { return g; }
};

// scale * dot, the scale positive. units: how many units of R a natural unit is.
template <class R>
struct ScaledScores {
  static constexpr bool kMonotone = true;
  float scale, natural_scale;
  ScaledScores(const ScoreOptions& o, double units)
      : scale(float(o.scale * units)), natural_scale(float(o.scale)) {}
  template <int kSize>
  __device__ __forceinline__ void prepare(float (&)[kSize], int) const {}
  template <int kSize>
  __device__ __forceinline__ void prepare_transposed(float (&)[kSize], int) const {}
  __device__ __forceinline__ R value(R dot, int) const { return dot * R(scale); }
  __device__ __forceinline__ R rounded(R dot) const { return __fmul_rn(dot.x, scale); }
  __device__ __forceinline__ R unit() const { return R(natural_scale); }
  __device__ __forceinline__ R chain(R g, R) const { return g; }
};

// softcap tanh(scale * dot / softcap).
template <class R>
struct SoftcappedScores {
  static constexpr bool kMonotone = false;
  float softcap, inverse_softcap, natural_scale, scale_over_softcap;
  SoftcappedScores(const ScoreOptions& o, double units)
      : softcap(float(o.softcap * units)),
        inverse_softcap(float(1 / (o.softcap * units))),
        natural_scale(float(o.scale)),
        scale_over_softcap(float(o.scale / o.softcap)) {}
  template <int kSize>
  __device__ __forceinline__ void prepare(float (&tile)[kSize], int) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) tile[i] = (R(softcap) * tanh(R(tile[i]) * R(scale_over_softcap))).x;
  }
  template <int kSize>
  __device__ __forceinline__ void prepare_transposed(float (&tile)[kSize], int column0) const {
    prepare(tile, column0);
  }
  __device__ __forceinline__ R value(R score, int) const { return score; }
  __device__ __forceinline__ R rounded(R score) const { return score; }
  __device__ __forceinline__ R unit() const { return R(natural_scale); }
  // An absent score, -inf, has g = 0.
  __device__ __forceinline__ R chain(R g, R score) const {
    const R gate = score * R(inverse_softcap);
    return select(g == R(0), g, g * (R(1) - gate * gate));
  }
};

}  // namespace monoidreduce
