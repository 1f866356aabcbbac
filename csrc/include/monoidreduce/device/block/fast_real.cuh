// Real types with which the tensor-core kernels instantiate monoids. Arithmetic is in float. Functions take
// one or two instructions, except the logarithm, which is computed once per row.
//
// Bits works in base 2, for monoids made of exponentials of scores and logarithms of masses. Scores are in
// units of log 2, exp and log have base 2, and so have row maxima and log-sum-exps (natural = bits * ln 2).
// The factor log2(e) is part of the scale of the scores.
//
// Full works in natural units and has float32's accuracy. Its logarithm has a second word (math.h).
//
// Fast<E> works in natural units. Its functions are as accurate as the element type E, to which weights are
// rounded.
#pragma once

#include <cstdint>
#include <type_traits>

#include "monoidreduce/device/arch/approximate.cuh"
#include "monoidreduce/math.h"

namespace monoidreduce {

template <class Functions>
struct FastReal {
  float x;

  FastReal() = default;
  template <class T>
    requires std::is_arithmetic_v<T>
  __host__ __device__ __forceinline__ constexpr FastReal(T value) : x(static_cast<float>(value)) {}

  MR_HD friend FastReal operator+(FastReal a, FastReal b) { return a.x + b.x; }
  MR_HD friend FastReal operator-(FastReal a, FastReal b) { return a.x - b.x; }
  MR_HD friend FastReal operator*(FastReal a, FastReal b) { return a.x * b.x; }
  __device__ __forceinline__ friend FastReal operator/(FastReal a, FastReal b) {
    return a.x * arch::reciprocal(b.x);
  }
  MR_HD friend FastReal operator-(FastReal a) { return -a.x; }
  MR_HD friend bool operator<(FastReal a, FastReal b) { return a.x < b.x; }
  MR_HD friend bool operator<=(FastReal a, FastReal b) { return a.x <= b.x; }
  MR_HD friend bool operator>(FastReal a, FastReal b) { return a.x > b.x; }
  MR_HD friend bool operator==(FastReal a, FastReal b) { return a.x == b.x; }
  MR_HD friend bool operator!=(FastReal a, FastReal b) { return a.x != b.x; }

  // If one operand is NaN, returns the other.
  __device__ __forceinline__ friend FastReal max(FastReal a, FastReal b) { return fmaxf(a.x, b.x); }
  __device__ __forceinline__ friend FastReal abs(FastReal a) { return fabsf(a.x); }
  __device__ __forceinline__ friend FastReal exp(FastReal a) { return Functions::exp(a.x); }
  // Ignores the rounding error of x (math.h): rounding the weight to 16 bits or tf32 for the matrix product
  // is a larger error.
  __device__ __forceinline__ friend FastReal exp(FastReal a, FastReal) { return exp(a); }
  __device__ __forceinline__ friend FastReal log(FastReal a) { return Functions::log(a.x); }
  __device__ __forceinline__ friend FastReal log_rest(FastReal a) {
    if constexpr (requires { Functions::log_rest(a.x); })
      return Functions::log_rest(a.x);
    else
      return 0.f;
  }
  __device__ __forceinline__ friend FastReal tanh(FastReal a) { return Functions::tanh(a.x); }
  __device__ __forceinline__ friend FastReal sigmoid(FastReal a) { return Functions::sigmoid(a.x); }
  __device__ __forceinline__ friend FastReal erf(FastReal a) { return erff(a.x); }
};

template <class Functions>
struct RealTraits<FastReal<Functions>> {
  using Scalar = float;
  using Index = std::int32_t;
  using Mask = bool;
};

struct BaseTwo {
  __device__ __forceinline__ static float exp(float x) { return arch::exp2(x); }
  // Called once per row. The approximate instruction's error of 2^-22 would be visible in a log-sum-exp.
  __device__ __forceinline__ static float log(float x) { return ::log2f(x); }
  // Here x is a pure number, without the factor log2(e). The relative error is 2^-19, also near 0: a large
  // softcap multiplies such a tanh, and the difference of two numbers near 1 would have no correct digits
  // there. Up to 0.05 two terms of the series are more accurate.
  __device__ __forceinline__ static float tanh(float x) {
    const float series = x - x * (x * x) * (1.f / 3);
    const float quotient = 1.f - 2.f * arch::reciprocal(1.f + arch::exp2(x * float(2 * kLog2E)));
    return fabsf(x) < 0.05f ? series : quotient;
  }
};
using Bits = FastReal<BaseTwo>;
template <>
MR_HD Bits unit_of_scores<Bits>() {
  return kLn2;
}

struct NaturalInFull {
  __device__ __forceinline__ static float exp(float x) { return arch::exp2(x * float(kLog2E)); }
  __device__ __forceinline__ static float log(float x) { return ::logf(x); }
  __device__ __forceinline__ static float log_rest(float x) { return monoidreduce::log_rest(x); }
  __device__ __forceinline__ static float sigmoid(float x) { return arch::reciprocal(1.f + exp(-x)); }
  __device__ __forceinline__ static float tanh(float x) { return ::tanhf(x); }
};
using Full = FastReal<NaturalInFull>;

template <class E>
struct Natural {
  // tanh.approx has an error of 2^-11: enough for bfloat16, which has 8 bits, not for float16.
  static constexpr bool kCoarse = std::is_same_v<E, __nv_bfloat16>;
  __device__ __forceinline__ static float exp(float x) { return arch::exp2(x * float(kLog2E)); }
  __device__ __forceinline__ static float log(float x) { return ::logf(x); }  // accurate, as in BaseTwo
  __device__ __forceinline__ static float sigmoid(float x) {
    return kCoarse ? 0.5f + 0.5f * arch::tanh(0.5f * x) : arch::reciprocal(1.f + exp(-x));
  }
  __device__ __forceinline__ static float tanh(float x) {
    return kCoarse ? arch::tanh(x) : 2.f * arch::reciprocal(1.f + exp(-2.f * x)) - 1.f;
  }
};
template <class E>
using Fast = FastReal<Natural<E>>;

}  // namespace monoidreduce
