// The functions that a monoid may call, for float and double, on host and device.
//
// A monoid is written once, as a template over a real type R. On the GPU and in tests R is float or double. In the CPU
// engine R is a Pack (cpu/pack.h), a vector with one row per lane. So a monoid never branches on a value: it calls
// select(condition, a, b).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__CUDACC__)
#define MR_HD __host__ __device__ __forceinline__
#define MR_UNROLL _Pragma("unroll")
#define MR_ROLL _Pragma("unroll 1")
#else
// Always inlined on the host: the linker could otherwise pick a copy compiled for AVX-512 on a machine without it.
#define MR_HD [[gnu::always_inline]] inline
#define MR_UNROLL
#define MR_ROLL
#endif

namespace monoidreduce {

// The types that belong to a real type: one lane, an integer of the same width, and the result of a comparison.
template <class R>
struct RealTraits;
template <>
struct RealTraits<float> {
  using Scalar = float;
  using Index = std::int32_t;
  using Mask = bool;
};
template <>
struct RealTraits<double> {
  using Scalar = double;
  using Index = std::int64_t;
  using Mask = bool;
};
template <class R>
using Scalar = typename RealTraits<R>::Scalar;
template <class R>
using Index = typename RealTraits<R>::Index;
template <class R>
using Mask = typename RealTraits<R>::Mask;

inline constexpr double kLog2E = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

template <class R>
MR_HD R infinity() {
  return R(Scalar<R>(HUGE_VAL));
}
// The largest finite number. (A variable, because the device compiler warns about calls of host functions.)
template <class T>
inline constexpr T kLargest = std::numeric_limits<T>::max();
template <class R>
MR_HD R largest() {
  return R(kLargest<Scalar<R>>);
}

// A score of 1, in natural units. (Bits, in device/block/fast_real.cuh, has scores to the base 2 and specializes this.)
template <class R>
MR_HD R unit_of_scores() {
  return R(1);
}

// One lane of a number that is the same in all lanes, such as a column index.
MR_HD std::int32_t first_lane(std::int32_t x) { return x; }
MR_HD std::int64_t first_lane(std::int64_t x) { return x; }

template <class T>
MR_HD T select(bool condition, T a, T b) {
  return condition ? a : b;
}

// The low word of x: its rounding error. It is 0 if x or the rounded number is not finite, because their difference would
// turn the sum of both words into NaN.
template <class T>
MR_HD T low_word(T x, T rounded) {
  const T lost = x - rounded;
  return lost - lost == T(0) ? lost : T(0);
}

// x / y rounded down; 0 if y is 0. The least number / -1 wraps around.
template <class I>
MR_HD I floor_of_quotient(I x, I y) {
  if (y == 0) return 0;
  if (y == -1) return static_cast<I>(0 - static_cast<std::uint64_t>(x));
  return x / y - (x % y != 0 && (x < 0) != (y < 0));
}

// Returns b if a is NaN. So a NaN score never becomes the frame (row max); it reaches the result through the mass.
MR_HD float max(float a, float b) { return a > b ? a : b; }
MR_HD double max(double a, double b) { return a > b ? a : b; }
MR_HD float abs(float x) { return ::fabsf(x); }
MR_HD double abs(double x) { return ::fabs(x); }
MR_HD float exp2(float x) { return ::exp2f(x); }
MR_HD double exp2(double x) { return ::exp2(x); }
MR_HD float exp(float x) { return ::expf(x); }
MR_HD double exp(double x) { return ::exp(x); }
MR_HD float log(float x) { return ::logf(x); }
MR_HD double log(double x) { return ::log(x); }
MR_HD float log2(float x) { return ::log2f(x); }
MR_HD double log2(double x) { return ::log2(x); }
MR_HD float tanh(float x) { return ::tanhf(x); }
MR_HD double tanh(double x) { return ::tanh(x); }
MR_HD float erf(float x) { return ::erff(x); }
MR_HD double erf(double x) { return ::erf(x); }
// a b + c, rounded the same way wherever it is computed. A compiler may fuse a product with the operation that uses it, and
// that operation differs between forward and backward. An explicit fma is left as it is.
template <class R>
MR_HD R multiply_add(R a, R b, R c) {
  return a * b + c;
}
#if defined(__CUDA_ARCH__)
MR_HD float multiply_add(float a, float b, float c) { return ::fmaf(a, b, c); }
MR_HD double multiply_add(double a, double b, double c) { return ::fma(a, b, c); }
#endif
// Real types that have a more accurate or a faster form overload the functions below.
template <class R>
MR_HD R sigmoid(R x) {
  return R(1) / (R(1) + exp(-x));
}
// e^(x + rest), where rest is the rounding error of x: small compared with 1 unless e^x is 0. For an infinite x, rest is
// NaN. The bound of 1 replaces that NaN, so 0 stays 0 and infinity stays infinity.
template <class R>
MR_HD R exp(R x, R rest) {
  const R power = exp(x);
  return multiply_add(power, select(rest < R(1), rest, R(1)), power);
}
// The rounding error of log(x). Called once per row, so it may be slow.
template <class R>
MR_HD R log_rest(R) {
  return R(0);
}
MR_HD float log_rest(float x) {
  const double exact = ::log(static_cast<double>(x));
  return abs(exact) == infinity<double>() ? 0.f : static_cast<float>(exact - log(x));
}

}  // namespace monoidreduce
