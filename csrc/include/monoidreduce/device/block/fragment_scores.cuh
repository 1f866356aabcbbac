// Score policies of the tensor-core kernels: score.h for a fragment, as the concepts of traits.h ask
// (FragmentScores, TransposedScores and those beside them). Each case is a policy of its own, so that it
// costs only what it needs.
//
// of_head and pulled give the policy of a head (forward) or of a tile (backward). Where a bias has a
// gradient, add_bias_gradient(i, g) receives the derivative with respect to score i.
#pragma once

#include <cmath>

#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/matrix.cuh"
#include "monoidreduce/score.h"
#include "monoidreduce/traits.h"

namespace monoidreduce {

// dot + bias, with one bias per column, of element type E. bias: [columns], or null for none.
template <class R, class E>
struct BiasedScores {
  static constexpr bool kMonotone = true;
  const E* bias;
  std::int64_t stride;
  int columns;
  __device__ __forceinline__ const BiasedScores& of_head(int, int) const { return *this; }
  __device__ __forceinline__ const BiasedScores& pulled(int, int, int, int) const { return *this; }
  // The bias of column first + n, or 0 beyond the last column.
  __device__ __forceinline__ float bias_of(int first, int n) const {
    // The load is unconditional, so that all loads of a tile are in flight together. The later condition
    // compares the constant n; column numbers would take registers until the loads arrive.
    const int left = columns - first;
    const float x = static_cast<float>(bias[(first + ::min(n, left - 1)) * stride]);
    return n < left ? x : 0.f;
  }
  template <int kSize>
  __device__ __forceinline__ void prepare(float (&tile)[kSize], int, int column0) const {
    if (bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = bias_of(column0 + fragment_column(0), 2 * i + e);
        tile[i + e] += x, tile[i + e + 2] += x;
      }
    }
  }
  template <int kSize>
  __device__ __forceinline__ void prepare_transposed(float (&tile)[kSize], int, int column0) const {
    if (bias == nullptr) return;
    const float x[2] = {bias_of(column0 + fragment_row(0), 0), bias_of(column0 + fragment_row(0), 8)};
#pragma unroll
    for (int i = 0; i < kSize; ++i) tile[i] += x[row_of_element(i)];
  }
  __device__ __forceinline__ R value(R score, int) const { return score; }
  __device__ __forceinline__ R rounded(R score) const { return score; }
  __device__ __forceinline__ const BiasedScores& of_scores(bool) const { return *this; }
  __device__ __forceinline__ R unit() const { return R(1); }
  template <int kSize>
  __device__ __forceinline__ void finish_transposed(float (&)[kSize], float (&)[kSize], int, int) const {}
  __device__ __forceinline__ R chain(R g, R, int) const { return g; }
};
// Whether the bias depends on the column alone, so that its gradient is a sum over rows.
template <class Scores>
inline constexpr bool kBiasedByColumn = false;
template <class R, class E>
inline constexpr bool kBiasedByColumn<BiasedScores<R, E>> = true;

// scale * dot, with a positive scale. units: how many units of R a natural unit is (log2(e) for Bits).
template <class R>
struct ScaledScores {
  static constexpr bool kMonotone = true;
  float scale, natural_scale;
  ScaledScores(const ScoreOptions& o, double units)
      : scale(float(o.scale * units)), natural_scale(float(o.scale)) {}
  __device__ __forceinline__ const ScaledScores& of_head(int, int) const { return *this; }
  __device__ __forceinline__ const ScaledScores& pulled(int, int, int, int) const { return *this; }
  template <int kSize>
  __device__ __forceinline__ void prepare(float (&)[kSize], int, int) const {}
  template <int kSize>
  __device__ __forceinline__ void prepare_transposed(float (&)[kSize], int, int) const {}
  __device__ __forceinline__ R value(R dot, int) const { return dot * R(scale); }
  __device__ __forceinline__ R rounded(R dot) const { return __fmul_rn(dot.x, scale); }
  __device__ __forceinline__ ScaledScores of_scores(bool held) const {
    ScaledScores policy = *this;
    if (held) policy.scale = 1.f;
    return policy;
  }
  __device__ __forceinline__ R unit() const { return R(natural_scale); }
  template <int kSize>
  __device__ __forceinline__ void finish_transposed(float (&)[kSize], float (&)[kSize], int, int) const {}
  __device__ __forceinline__ R chain(R g, R, int) const { return g; }
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
  __device__ __forceinline__ const SoftcappedScores& of_head(int, int) const { return *this; }
  __device__ __forceinline__ const SoftcappedScores& pulled(int, int, int, int) const { return *this; }
  template <int kSize>
  __device__ __forceinline__ void prepare(float (&tile)[kSize], int, int) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) tile[i] = (R(softcap) * tanh(R(tile[i]) * R(scale_over_softcap))).x;
  }
  template <int kSize>
  __device__ __forceinline__ void prepare_transposed(float (&tile)[kSize], int row0, int column0) const {
    prepare(tile, row0, column0);
  }
  __device__ __forceinline__ R value(R score, int) const { return score; }
  __device__ __forceinline__ R rounded(R score) const { return score; }
  __device__ __forceinline__ R unit() const { return R(natural_scale); }
  template <int kSize>
  __device__ __forceinline__ void finish_transposed(float (&)[kSize], float (&)[kSize], int, int) const {}
  // A masked score, -inf, has g = 0: without the select, g would become NaN.
  __device__ __forceinline__ R chain(R g, R score, int) const {
    const R gate = score * R(inverse_softcap);
    return select(g == R(0), g, g * (R(1) - gate * gate));
  }
};

// A score before its bias, without its last factor: tanh(scale * dot / softcap), to be multiplied by the
// softcap; or, without a softcap, the dot product, to be multiplied by the scale. A kernel that is compiled
// with or without a softcap takes fewer registers than one that asks (kUnknown).
enum class Softcap { kUnknown, kAbsent, kPresent };
template <class R, Softcap kSoftcap = Softcap::kUnknown>
struct SoftcapOrScale {
  // before: the factor inside the tanh, 0 for no softcap. after: the last factor, in units of R.
  float before, after;
  SoftcapOrScale(const ScoreOptions& o, double units)
      : before(o.softcap == 0 ? 0.f : float(o.scale / o.softcap)),
        after(float((o.softcap == 0 ? o.scale : o.softcap) * units)) {}
  __device__ __forceinline__ bool caps() const {
    return kSoftcap == Softcap::kUnknown ? before != 0.f : kSoftcap == Softcap::kPresent;
  }
  template <int kSize>
  __device__ __forceinline__ void operator()(float (&tile)[kSize]) const {
    if (!caps()) return;
#pragma unroll
    for (float& x : tile) x = tanh(R(x * before)).x;
  }
  __device__ __forceinline__ R chain(R g, R x) const { return caps() ? g * (R(1) - x * x) : g; }
};

// softcap tanh(scale * dot / softcap) + bias, or scale * dot + bias, with a bias for each row and column that
// is read from global memory. A false bool bias masks its element. The gradient of a floating bias is added
// to d_bias.
template <class R>
struct ElementBiasedScores {
  Tensor bias, d_bias;  // [batch, heads, rows, columns]; d_bias: float, or absent
  SoftcapOrScale<R> cap;
  float natural_scale, units;
  ElementBiasedScores(const ScoreOptions& o, double units, const Tensor& bias, const Tensor& d_bias)
      : bias(bias), d_bias(d_bias), cap(o, units), natural_scale(float(o.scale)), units(float(units)) {}

  // What is added to a score, in natural units; -inf masks it. Indices are clamped: rows and columns beyond
  // the last weigh nothing, so any bias will do.
  __device__ __forceinline__ static float addend(const Matrix<float>& bias, int row, int column) {
    const char* const at = bias.at(::min(row, int(bias.rows()) - 1), ::min(column, int(bias.width()) - 1));
    if (bias.tensor.dtype == DType::kBool) return *at ? 0.f : -INFINITY;
    return Matrix<float>::Access::widen(Matrix<float>::Access::load(at, bias.tensor.dtype),
                                        bias.tensor.dtype);
  }
  // The score, from what SoftcapOrScale leaves of a dot product (x). That may be NaN where a bool bias masks
  // it. The intrinsics give the same bits in both passes, however the compiler treats the code around.
  __device__ __forceinline__ float score(float x, float added) const {
    if (added == -INFINITY && bias.dtype == DType::kBool) return added;
    return __fmaf_rn(x, cap.after, __fmul_rn(added, units));
  }

  struct OfHead {
    static constexpr bool kMonotone = false;
    const ElementBiasedScores& all;
    Matrix<float> bias;

    template <int kSize>
    __device__ __forceinline__ void prepare(float (&tile)[kSize], int row0, int column0) const {
      all.cap(tile);
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        tile[i] = all.score(
            tile[i], addend(bias, row0 + fragment_row(row_of_element(i)), column0 + fragment_column(i)));
    }
    __device__ __forceinline__ R value(R score, int) const { return score; }
    __device__ __forceinline__ R rounded(R score) const { return score; }
  };
  __device__ __forceinline__ OfHead of_head(int batch, int head) const {
    return {*this, Matrix<float>(bias, batch, head)};
  }

  struct Pulled {
    const ElementBiasedScores& all;
    const Matrix<float> bias, d_bias;
    const int row0, column0;

    __device__ __forceinline__ int row(int i) const { return row0 + fragment_column(i); }
    __device__ __forceinline__ int column(int i) const { return column0 + fragment_row(row_of_element(i)); }
    template <int kSize>
    __device__ __forceinline__ void prepare_transposed(float (&tile)[kSize], int, int) const {
      all.cap(tile);
    }
    __device__ __forceinline__ R value(R x, int i) const {
      return all.score(x.x, addend(bias, row(i), column(i)));
    }
    __device__ __forceinline__ R unit() const { return R(all.natural_scale); }
    __device__ __forceinline__ R chain(R g, R x, int) const { return all.cap.chain(g, x); }
    // g: the derivative with respect to score i, times unit().
    __device__ __forceinline__ void add_bias_gradient(int i, float g) const {
      if (row(i) < d_bias.rows() && column(i) < d_bias.width())
        atomicAdd(reinterpret_cast<float*>(d_bias.at(row(i), column(i))), g * (1.f / all.natural_scale));
    }
    template <int kSize>
    __device__ __forceinline__ void finish_transposed(float (&weights)[kSize], float (&g)[kSize], int,
                                                      int) const {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (weights[i] == 0.f) g[i] = 0.f;  // the payload of a masked element may not be finite
      }
    }
  };
  __device__ __forceinline__ Pulled pulled(int batch, int head, int row0, int column0) const {
    return {*this, Matrix<float>(bias, batch, head), Matrix<float>(d_bias, batch, head), row0, column0};
  }
};

template <class Scores>
inline constexpr bool kBiasedByElement = false;
template <class R>
inline constexpr bool kBiasedByElement<ElementBiasedScores<R>> = true;
template <class R>
inline constexpr bool kScoresOfElements<ElementBiasedScores<R>> = true;

// softcap tanh(scale * dot / softcap) + bias, or scale * dot + bias, with biases of element type B in tiles
// in shared memory (bias_tile.cuh). folded and pulled give the policy of a tile in the forward and in the
// backward pass.
template <class R, class B, Softcap kSoftcap = Softcap::kUnknown>
struct TileBiasedScores {
  using BiasElement = B;
  SoftcapOrScale<R, kSoftcap> cap;
  float units, natural_scale;
  bool rows_share;   // all rows of a head have the same biases
  bool owns_d_bias;  // d_bias is not broadcast: each row and column of a head has an element of its own
  Tensor d_bias;     // [batch, heads, rows, columns], float; or absent
  TileBiasedScores(const ScoreOptions& o, double units, bool rows_share, bool owns_d_bias,
                   const Tensor& d_bias)
      : cap(o, units),
        units(float(units)),
        natural_scale(float(o.scale)),
        rows_share(rows_share),
        owns_d_bias(owns_d_bias),
        d_bias(d_bias) {}

  // The intrinsics give the same bits in both passes, however the compiler treats the code around.
  __device__ __forceinline__ float score(float x, float bias) const {
    if constexpr (std::is_same_v<B, bool>) return bias == 0.f ? __fmul_rn(x, cap.after) : -INFINITY;
    return __fmaf_rn(x, cap.after, __fmul_rn(bias, units));
  }

  template <class Biases>
  struct Folded {
    static constexpr bool kMonotone = false;
    const TileBiasedScores& all;
    const Biases biases;
    template <int kSize>
    __device__ __forceinline__ void prepare(float (&tile)[kSize], int, int) const {
      all.cap(tile);
#pragma unroll
      for (int i = 0; i < kSize; i += 2) {
        const float2 pair = biases.pair(i);
        tile[i] = all.score(tile[i], pair.x), tile[i + 1] = all.score(tile[i + 1], pair.y);
      }
    }
    __device__ __forceinline__ R value(R score, int) const { return score; }
    __device__ __forceinline__ R rounded(R score) const { return score; }
  };
  template <class Biases>
  struct Pulled {
    const TileBiasedScores& all;
    const Biases biases;
    template <int kSize>
    __device__ __forceinline__ void prepare(float (&tile)[kSize], int, int) const {
      all.cap(tile);
    }
    template <int kSize>
    __device__ __forceinline__ void prepare_transposed(float (&tile)[kSize], int, int) const {
      all.cap(tile);
    }
    __device__ __forceinline__ R value(R x, int i) const {
      // A bool bias masks at the end, in finish_transposed: its addresses take registers that are free by then.
      // (Read here, it made the kernel of float32 queries' gradients, 256 wide, spill 42 bytes.)
      if constexpr (std::is_same_v<B, bool>) return all.score(x.x, 0.f);
      return all.score(x.x, biases[i]);
    }
    __device__ __forceinline__ R unit() const { return R(all.natural_scale); }
    __device__ __forceinline__ R chain(R g, R x, int) const { return all.cap.chain(g, x); }
    template <int kSize>
    __device__ __forceinline__ void finish_transposed(float (&weights)[kSize], float (&g)[kSize], int,
                                                      int) const {
      if constexpr (std::is_same_v<B, bool>) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (biases[i] != 0.f) weights[i] = g[i] = 0.f;
        }
      }
    }
  };
  template <class Biases>
  __device__ __forceinline__ Folded<Biases> folded(const Biases& biases) const {
    return {*this, biases};
  }
  template <class Biases>
  __device__ __forceinline__ Pulled<Biases> pulled(const Biases& biases) const {
    return {*this, biases};
  }
};

// softcap tanh((scale * dot + bias) / softcap), or scale * dot + bias where softcap is 0. bias: [columns] of
// element type E, or null. Only for fragments whose rows are rows of the fold.
template <class R, class E>
struct LogitScores {
  static constexpr bool kMonotone = false;
  float scale, natural_scale, softcap, inverse_softcap, bias_unit;
  const E* bias;
  std::int64_t bias_stride;
  int columns;
  // units: how many units of R a natural unit is.
  LogitScores(const ScoreOptions& o, double units, const E* bias, std::int64_t bias_stride, int columns)
      : scale(float(o.scale * units)),
        natural_scale(float(o.scale)),
        softcap(float(o.softcap * units)),
        inverse_softcap(o.softcap == 0 ? 0.f : float(1 / (o.softcap * units))),
        bias_unit(float(units)),
        bias(bias),
        bias_stride(bias_stride),
        columns(columns) {}
  __device__ __forceinline__ float bias_of(int column) const {
    return bias != nullptr && column < columns ? static_cast<float>(bias[column * bias_stride]) * bias_unit
                                               : 0.f;
  }
  template <int kSize>
  __device__ __forceinline__ void prepare(float (&tile)[kSize], int, int column0) const {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = bias_of(column0 + fragment_column(i + e));
        tile[i + e] = fmaf(tile[i + e], scale, x), tile[i + e + 2] = fmaf(tile[i + e + 2], scale, x);
      }
    }
    if (softcap == 0.f) return;
#pragma unroll
    for (int i = 0; i < kSize; ++i) tile[i] = softcap * tanh(R(tile[i] * inverse_softcap)).x;
  }
  __device__ __forceinline__ R value(R score, int) const { return score; }
  __device__ __forceinline__ R rounded(R score) const { return score; }
  __device__ __forceinline__ R unit() const { return R(natural_scale); }
  __device__ __forceinline__ R chain(R g, R score, int) const {
    const R gate = softcap == 0.f ? R(0) : score * R(inverse_softcap);  // a score may be infinite
    return g * (R(1) - gate * gate);
  }
};

}  // namespace monoidreduce
