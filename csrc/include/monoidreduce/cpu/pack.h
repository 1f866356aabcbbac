// Pack<T, N>: N rows side by side in one vector register, the real type of monoids on the CPU. One lane is one row, as
// one thread is one row on the GPU, so a monoid needs no horizontal operation. Built on the compiler's vector types.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "monoidreduce/cpu/isa.h"
#include "monoidreduce/math.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

template <class T, int N>
struct Pack {
  typedef T Vector __attribute__((vector_size(N * sizeof(T)), may_alias));
  Vector v;

  Pack() = default;
  MR_HD Pack(Vector vector) : v(vector) {}
  // Broadcasts x. (x - 0 is x for every x, -0 included.)
  template <class X>
    requires std::is_arithmetic_v<X>
  MR_HD Pack(X x) : v(static_cast<T>(x) - Vector{}) {}

  template <class X>
  MR_HD explicit Pack(Pack<X, N> x) : v(__builtin_convertvector(x.v, Vector)) {}

  MR_HD static Pack load(const T* p) {
    Pack a;
    std::memcpy(&a.v, p, sizeof(Vector));
    return a;
  }
  MR_HD void store(T* p) const { std::memcpy(p, &v, sizeof(Vector)); }
  MR_HD T operator[](int lane) const { return v[lane]; }

  MR_HD friend Pack operator+(Pack a, Pack b) { return a.v + b.v; }
  MR_HD friend Pack operator-(Pack a, Pack b) { return a.v - b.v; }
  MR_HD friend Pack operator*(Pack a, Pack b) { return a.v * b.v; }
  MR_HD friend Pack operator/(Pack a, Pack b) { return a.v / b.v; }
  MR_HD friend Pack operator-(Pack a) { return -a.v; }
};

// The result of a comparison. In each lane either all bits are set, or none.
template <class I, int N>
struct PackMask {
  typedef I Vector __attribute__((vector_size(N * sizeof(I)), may_alias));
  Vector v;
  MR_HD friend PackMask operator&(PackMask a, PackMask b) { return {a.v & b.v}; }
  MR_HD friend PackMask operator|(PackMask a, PackMask b) { return {a.v | b.v}; }
  MR_HD friend PackMask operator!(PackMask a) { return {~a.v}; }
  MR_HD bool operator[](int lane) const { return v[lane] != 0; }
};

template <class T>
using IntegerOf = typename RealTraits<std::conditional_t<sizeof(T) == 4, float, double>>::Index;

#define MR_COMPARE(op)                                                      \
  template <class T, int N>                                                 \
  MR_HD PackMask<IntegerOf<T>, N> operator op(Pack<T, N> a, Pack<T, N> b) { \
    return {a.v op b.v};                                                    \
  }
MR_COMPARE(<)
MR_COMPARE(>)
MR_COMPARE(<=)
MR_COMPARE(>=)
MR_COMPARE(==)
MR_COMPARE(!=)
#undef MR_COMPARE

template <class T, int N>
MR_HD Pack<T, N> select(PackMask<IntegerOf<T>, N> condition, Pack<T, N> a, Pack<T, N> b) {
  return Pack<T, N>(condition.v ? a.v : b.v);
}
template <class T, int N>
MR_HD T first_lane(Pack<T, N> x) {
  return x.v[0];
}
template <class I, int N>
MR_HD bool any(PackMask<I, N> m) {
  I bits = 0;
  for (int lane = 0; lane < N; ++lane) bits |= m.v[lane];
  return bits != 0;
}

template <class T, int N>
MR_HD Pack<T, N> max(Pack<T, N> a, Pack<T, N> b) {
  return select(a > b, a, b);
}
template <class T, int N>
MR_HD Pack<T, N> abs(Pack<T, N> a) {
  return select(a < Pack<T, N>(0), -a, a);
}

template <class To, class From>
MR_HD To bit_cast_vector(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Evaluates a polynomial by Horner's rule; coefficients are in the order of increasing degree.
template <class R, int kTerms>
MR_HD R polynomial(R x, const double (&coefficient)[kTerms]) {
  R sum = R(coefficient[kTerms - 1]);
  for (int k = kTerms - 2; k >= 0; --k) sum = sum * x + R(coefficient[k]);
  return sum;
}

// Adding 1.5 * 2^mantissa rounds to the nearest integer and leaves it in the low bits.
template <class T>
inline constexpr double kRound = 1.5 * (1LL << (sizeof(T) == 4 ? 23 : 52));

// 2^n 2^r for n = rounded - kRound and |r| <= 1/2. The float polynomial is a minimax fit (relative error
// 2e-9), the double one the Taylor series.
template <class T, int N>
MR_HD Pack<T, N> two_to_the(Pack<T, N> rounded, Pack<T, N> r) {
  using R = Pack<T, N>;
  using I = typename PackMask<IntegerOf<T>, N>::Vector;
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52, kBias = sizeof(T) == 4 ? 127 : 1023;
  const I n = bit_cast_vector<I>(rounded.v) - bit_cast_vector<I>(R(kRound<T>).v);
  const R power = bit_cast_vector<typename R::Vector>((n + kBias) << kMantissa);
  if constexpr (sizeof(T) == 4) {
    return power * polynomial(r, {1., 6.931472057e-01, 2.402264689e-01, 5.550328777e-02, 9.618488974e-03,
                                  1.339993118e-03, 1.534580755e-04});
  } else {
    return power *
           polynomial(r, {1., 0.69314718055994530942, 0.24022650695910071233, 0.055504108664821579953,
                          0.009618129107628477162, 0.0013333558146428443423, 0.00015403530393381609954,
                          1.525273380405984028e-5, 1.3215486790144309488e-6, 1.0178086009239699727e-7,
                          7.0549116208011233299e-9, 4.4455382718708114976e-10, 2.5678435993488205142e-11,
                          1.3691488853904128881e-12});
  }
}

// Clamps x to [-bias, bias + 1] times unit: two_to_the returns 0 and infinity for the two bounds. NaN is unchanged.
template <class T, int N>
MR_HD Pack<T, N> clamp_exponent(Pack<T, N> x, double unit) {
  using R = Pack<T, N>;
  constexpr int kBias = sizeof(T) == 4 ? 127 : 1023;
  x = select(x > R((kBias + 1) * unit), R((kBias + 1) * unit), x);
  return select(x < R(-kBias * unit), R(-kBias * unit), x);
}

// 2^x, within 1 ulp of the correctly rounded value for float, 2 ulp for double. Results below the smallest normal number are 0,
// and those above 2^127.5 (2^1023.5) are infinity.
template <class T, int N>
MR_HD Pack<T, N> exp2(Pack<T, N> x) {
  x = clamp_exponent(x, 1);
  const Pack<T, N> rounded = x + Pack<T, N>(kRound<T>);
  return two_to_the(rounded, x - (rounded - Pack<T, N>(kRound<T>)));
}

// e^x, as accurate as exp2. log2(e) is split into two parts, so that the argument of 2^r keeps its accuracy if x is large.
template <class T, int N>
MR_HD Pack<T, N> exp(Pack<T, N> x) {
  using R = Pack<T, N>;
  constexpr T kHigh = static_cast<T>(kLog2E);
  constexpr T kLow =
      sizeof(T) == 4 ? static_cast<T>(kLog2E - static_cast<double>(kHigh)) : T(2.0355273740931033e-17);
  x = clamp_exponent(x, kLn2);
  const R rounded = x * R(kHigh) + R(kRound<T>);
  const R n = rounded - R(kRound<T>);
  return two_to_the(rounded, (x * R(kHigh) - n) + x * R(kLow));
}

template <class T, int N, class F>
MR_HD Pack<T, N> each_lane(Pack<T, N> x, F f) {
  Pack<T, N> y;
  for (int lane = 0; lane < N; ++lane) y.v[lane] = f(x.v[lane]);
  return y;
}
template <class T, int N, class F>
MR_HD Pack<T, N> each_lane(Pack<T, N> x, Pack<T, N> y, F f) {
  Pack<T, N> z;
  for (int lane = 0; lane < N; ++lane) z.v[lane] = f(x.v[lane], y.v[lane]);
  return z;
}

// These are called once per row, so vectorizing them is not worth the code.
template <class T, int N>
MR_HD Pack<T, N> log2(Pack<T, N> x) {
  return each_lane(x, [](T a) { return ::monoidreduce::log2(a); });
}
template <class T, int N>
MR_HD Pack<T, N> log(Pack<T, N> x) {
  return each_lane(x, [](T a) { return ::monoidreduce::log(a); });
}
template <class T, int N>
MR_HD Pack<T, N> log_rest(Pack<T, N> x) {
  return each_lane(x, [](T a) { return ::monoidreduce::log_rest(a); });
}

// float: x + x^3 P(x^2) for |x| < 0.625, otherwise 1 - 2 / (e^2x + 1) with the sign of x. double: the C library's tanh.
template <class T, int N>
MR_HD Pack<T, N> tanh(Pack<T, N> x) {
  using R = Pack<T, N>;
  if constexpr (sizeof(T) == 4) {
    const R square = x * x, magnitude = abs(x);
    const R small = x + x * square *
                            polynomial(square, {-3.333328392e-01, 1.333149125e-01, -5.374349526e-02,
                                                2.065057900e-02, -5.717036561e-03});
    const R large = R(1) - R(2) / (exp(magnitude * R(2)) + R(1));
    return select(magnitude < R(0.625), small, select(x < R(0), -large, large));
  } else {
    return each_lane(x, [](T a) { return ::monoidreduce::tanh(a); });
  }
}

// float: x P(x^2) for |x| < 1, otherwise 1 - e^(-x^2) Q(1 / (1 + x/2)) with the sign of x. double: the C library's erf.
template <class T, int N>
MR_HD Pack<T, N> erf(Pack<T, N> x) {
  using R = Pack<T, N>;
  if constexpr (sizeof(T) == 4) {
    const R square = x * x, magnitude = abs(x);
    const R small =
        x * polynomial(square, {1.128379166e+00, -3.761262714e-01, 1.128360018e-01, -2.685444459e-02,
                                5.189535340e-03, -8.020841284e-04, 7.889119549e-05});
    const R t = R(1) / (R(1) + R(0.5) * magnitude);
    const R tail = polynomial(t, {2.073645095e-03, 2.570792337e-01, 4.081661949e-01, -9.065612216e-02,
                                  6.705463105e-01, -2.540866206e-01, 6.652409421e-03});
    const R large = R(1) - exp(-square) * tail;
    return select(magnitude < R(1), small, select(x < R(0), -large, large));
  } else {
    return each_lane(x, [](T a) { return ::monoidreduce::erf(a); });
  }
}

// Interleaves the lower (or upper) halves of a and b: a0 b0 a1 b1 ...
template <bool kUpper, class T, int N, int... kLane>
MR_HD Pack<T, N> interleave(Pack<T, N> a, Pack<T, N> b, std::integer_sequence<int, kLane...>) {
  constexpr int kFirst = kUpper ? N / 2 : 0;
#if defined(__clang__)
  return __builtin_shufflevector(a.v, b.v, (kFirst + kLane / 2 + kLane % 2 * N)...);
#else
  using I = typename PackMask<IntegerOf<T>, N>::Vector;
  return __builtin_shuffle(a.v, b.v, I{(kFirst + kLane / 2 + kLane % 2 * N)...});
#endif
}

// Transposes an N x N matrix by log2(N) perfect shuffles: lane j of pack i becomes lane i of pack j.
template <class T, int N>
MR_HD void transpose(Pack<T, N> (&packs)[N]) {
  constexpr std::make_integer_sequence<int, N> kLanes;
#pragma GCC unroll 4
  for (int done = 1; done < N; done *= 2) {
    Pack<T, N> shuffled[N];
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; ++i) {
      shuffled[2 * i] = interleave<false>(packs[i], packs[i + N / 2], kLanes);
      shuffled[2 * i + 1] = interleave<true>(packs[i], packs[i + N / 2], kLanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) packs[i] = shuffled[i];
  }
}

// A panel has as many rows as two vectors have lanes. One pass of the matrix product works on that many.
template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
template <class T>
using LanePack = Pack<T, kLanes<T>>;
inline constexpr int kPacks = 2;
template <class T>
inline constexpr int kPanel = kPacks * kLanes<T>;

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu

namespace monoidreduce {
template <class T, int N>
struct RealTraits<cpu::Pack<T, N>> {
  using Scalar = T;
  using Index = cpu::Pack<cpu::IntegerOf<T>, N>;
  using Mask = cpu::PackMask<cpu::IntegerOf<T>, N>;
};
}  // namespace monoidreduce
