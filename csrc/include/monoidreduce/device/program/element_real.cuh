// Real types with which the tensor-core kernels run users' programs, in natural units.
//
// ElementReal is for statistics. Its functions are accurate, for two reasons. Sums of its values over all
// columns are float32 outputs, in which the errors of ex2.approx and lg2.approx add up: with these
// instructions a sum of 1300 terms was 1.7e-4 off 682, and the tests' tolerance is 1.5e-4. And the largest
// value of a row is that of a single element: with tanh by ex2.approx it was six ulps off. GradientReal has
// the same functions, for local gradients.
//
// ScoreReal is for functions of attention's scores, whose weights are rounded to 16 bits: exp takes two
// instructions. Its sigmoid uses the accurate exp. A sigmoid by the short exp cost no more, but with it the
// backward pass of a function of four tensors spilled 148 bytes (NVRTC 13.0), against 44. WeightReal is for
// attend's weights, where it is the other way round: a sigmoid by the accurate exp spilled 144 bytes.
#pragma once

#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/device/program/functions.h"

namespace monoidreduce {

struct ElementFunctions {
  __device__ __forceinline__ static float exp(float x) { return ::expf(x); }
  __device__ __forceinline__ static float log(float x) { return ::logf(x); }
  __device__ __forceinline__ static float tanh(float x) { return ::tanhf(x); }
  __device__ __forceinline__ static float sigmoid(float x) { return arch::reciprocal(1.f + exp(-x)); }
};
struct GradientFunctions : ElementFunctions {};
struct ScoreFunctions : ElementFunctions {
  __device__ __forceinline__ static float exp(float x) { return arch::exp2(x * float(kLog2E)); }
  __device__ __forceinline__ static float tanh(float x) { return BaseTwo::tanh(x); }
};
struct WeightFunctions : ScoreFunctions {
  __device__ __forceinline__ static float sigmoid(float x) { return arch::reciprocal(1.f + exp(-x)); }
};
using ElementReal = FastReal<ElementFunctions>;
using GradientReal = FastReal<GradientFunctions>;
using ScoreReal = FastReal<ScoreFunctions>;
using WeightReal = FastReal<WeightFunctions>;

// A softmax weight in two instructions, where the accurate exp takes eight. Its errors matter less than
// errors in a total: a mass goes into a logarithm, and a mean is a quotient of sums of the same weights.
__device__ __forceinline__ ElementReal weight_of(ElementReal x) { return ScoreFunctions::exp(x.x); }
// share: the softmax probability p. Gradients with respect to a row's data are sums of these over the
// columns. What rounding the difference loses is the same fraction of every p of a row, so it is added back.
// Without that a sum of 390 of them had twice torch's error (emulated on a CPU).
__device__ __forceinline__ ElementReal share(ElementReal x, ElementReal high, ElementReal low) {
  return exp_of_difference(x.x, LogSumExp<float>::origin(high.x), low.x);
}
// For local gradients, which are rounded to 16 bits: the rounding error is not added back.
__device__ __forceinline__ GradientReal share(GradientReal x, GradientReal high, GradientReal low) {
  const GradientReal above = x - LogSumExp<GradientReal>::origin(high);
  return arch::exp2(fmaf(above.x, float(kLog2E), low.x * float(-kLog2E)));
}

template <class F>
__device__ __forceinline__ FastReal<F> product(FastReal<F> x, FastReal<F> y) {
  return __fmul_rn(x.x, y.x);
}
template <class F>
__device__ __forceinline__ FastReal<F> quotient(FastReal<F> x, FastReal<F> y) {
  return __fmul_rn(x.x, arch::reciprocal(y.x));
}
template <class F>
__device__ __forceinline__ FastReal<F> sqrt(FastReal<F> x) {
  return ::sqrtf(x.x);
}
template <class F>
__device__ __forceinline__ bool is_below(std::int64_t stream, Paired row, Paired column, FastReal<F> limit) {
  return is_below(stream, row, column, limit.x);
}
// As accurate as for float: a sine of a large angle, or a floor next to an integer, has no cheap form.
template <class F>
__device__ __forceinline__ FastReal<F> sin(FastReal<F> x) {
  return ::sinf(x.x);
}
template <class F>
__device__ __forceinline__ FastReal<F> cos(FastReal<F> x) {
  return ::cosf(x.x);
}
template <class F>
__device__ __forceinline__ FastReal<F> atan(FastReal<F> x) {
  return ::atanf(x.x);
}
template <class F>
__device__ __forceinline__ FastReal<F> floor(FastReal<F> x) {
  return ::floorf(x.x);
}
template <class F>
__device__ __forceinline__ FastReal<F> round(FastReal<F> x) {
  return ::nearbyintf(x.x);
}
template <class F>
__device__ __forceinline__ FastReal<F> pow(FastReal<F> x, FastReal<F> y) {
  return ::powf(x.x, y.x);
}
template <class F>
__device__ __forceinline__ FastReal<F> fmod(FastReal<F> x, FastReal<F> y) {
  return ::fmodf(x.x, y.x);
}
// The polynomial of its degree with the least relative error: 1.5e-7, rounding included. log1p takes any x,
// and three times the instructions.
template <class F>
__device__ __forceinline__ FastReal<F> log1p_of_unit(FastReal<F> e) {
  constexpr float kOfPowers[] = {0.0053648264f, -0.0300658010f, 0.0792045519f, -0.1375380307f,
                                 0.1915365607f, -0.2485716343f, 0.3332132399f, -0.4999964833f};
  float sum = kOfPowers[0];
#pragma unroll
  for (int k = 1; k < 8; ++k) sum = fmaf(sum, e.x, kOfPowers[k]);
  return fmaf(e.x * e.x, sum, e.x);
}
// A third of the instructions of two accurate logarithms. The error is at most 5e-7, and 2^-22 of a large result: as of rounding the
// logit to which the Gumbel number is added. Near 1, -log(u) is v (1 + v / 2 + ...) in v = 1 - u, which is exact; the polynomial has
// the least relative error, 1.5e-7 without rounding.
template <class F>
__device__ __forceinline__ FastReal<F> log_of_exponential(FastReal<F> u) {
  constexpr float kOfPowers[] = {0.39398248f, 0.11147445f, 0.26437917f, 0.33234752f, 0.50002157f};
  const float v = 1.f - u.x;
  float sum = kOfPowers[0];
#pragma unroll
  for (int k = 1; k < 5; ++k) sum = fmaf(sum, v, kOfPowers[k]);
  const float exponential = v < 0.3f ? fmaf(v * v, sum, v) : arch::log2(u.x) * float(-kLn2);
  return arch::log2(exponential) * float(kLn2);
}
// Near 0 a series keeps the digits that 1 + x and e^x - 1 lose. The first omitted term is 2^-23 of the sum.
template <class F>
__device__ __forceinline__ FastReal<F> log1p(FastReal<F> e) {
  const float x = e.x, series = x - x * x * (0.5f - x * (1.f / 3 - x * 0.25f));
  return fabsf(x) < 0.027f ? series : F::log(1.f + x);
}
template <class F>
__device__ __forceinline__ FastReal<F> expm1(FastReal<F> e) {
  const float x = e.x, series = x + x * x * (0.5f + x * (1.f / 6 + x * (1.f / 24)));
  return fabsf(x) < 0.06f ? series : F::exp(x) - 1.f;
}

}  // namespace monoidreduce
