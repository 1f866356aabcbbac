// The real type of programs on tensor cores, in natural units. Sums of its values over all columns are outputs in float32, and
// there the errors of ex2.approx and lg2.approx add up: with them a sum of 1300 terms was 1.7e-4 off 682, and the acceptance
// rule allows 1.5e-4. And its largest value is one element's: where tanh was by ex2.approx, six ulps off. So functions are accurate.
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
using ElementReal = FastReal<ElementFunctions>;

__device__ __forceinline__ ElementReal product(ElementReal x, ElementReal y) { return __fmul_rn(x.x, y.x); }
__device__ __forceinline__ ElementReal quotient(ElementReal x, ElementReal y) {
  return __fmul_rn(x.x, arch::reciprocal(y.x));
}
__device__ __forceinline__ ElementReal sqrt(ElementReal x) { return ::sqrtf(x.x); }
// Near 0 the series keep the digits that 1 + x and e^x - 1 lose. The first term left out is 2^-23 of the sum.
__device__ __forceinline__ ElementReal log1p(ElementReal e) {
  const float x = e.x, series = x - x * x * (0.5f - x * (1.f / 3 - x * 0.25f));
  return fabsf(x) < 0.027f ? series : ElementFunctions::log(1.f + x);
}
__device__ __forceinline__ ElementReal expm1(ElementReal e) {
  const float x = e.x, series = x + x * x * (0.5f + x * (1.f / 6 + x * (1.f / 24)));
  return fabsf(x) < 0.06f ? series : ElementFunctions::exp(x) - 1.f;
}

}  // namespace monoidreduce
