// Functions that generated programs call besides those of math.h. R is float or double, or FastReal on tensor
// cores.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "monoidreduce/integers.h"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/random.h"

namespace monoidreduce {

MR_HD float sqrt(float x) { return ::sqrtf(x); }
MR_HD double sqrt(double x) { return ::sqrt(x); }
MR_HD float expm1(float x) { return ::expm1f(x); }
MR_HD double expm1(double x) { return ::expm1(x); }
MR_HD float log1p(float x) { return ::log1pf(x); }
MR_HD double log1p(double x) { return ::log1p(x); }
MR_HD float sin(float x) { return ::sinf(x); }
MR_HD double sin(double x) { return ::sin(x); }
MR_HD float cos(float x) { return ::cosf(x); }
MR_HD double cos(double x) { return ::cos(x); }
MR_HD float atan(float x) { return ::atanf(x); }
MR_HD double atan(double x) { return ::atan(x); }
MR_HD float floor(float x) { return ::floorf(x); }
MR_HD double floor(double x) { return ::floor(x); }
MR_HD float round(float x) { return ::nearbyintf(x); }  // half to even
MR_HD double round(double x) { return ::nearbyint(x); }
MR_HD float pow(float x, float y) { return ::powf(x, y); }
MR_HD double pow(double x, double y) { return ::pow(x, y); }
MR_HD float fmod(float x, float y) { return ::fmodf(x, y); }
MR_HD double fmod(double x, double y) { return ::fmod(x, y); }

// x y and x / y, each rounded by itself. Otherwise a compiler fuses a product with a sum in one pass and not
// in another: a log weight of 20 was rounded in the forward pass and fused in the backward one, and gradients
// had up to 18 times the error of torch's.
template <class R>
MR_HD R product(R x, R y) {
  return x * y;
}
#if defined(__CUDA_ARCH__)
MR_HD float product(float x, float y) { return __fmul_rn(x, y); }
MR_HD double product(double x, double y) { return __dmul_rn(x, y); }
#endif
template <class R>
MR_HD R quotient(R x, R y) {
  return x / y;
}

// log(1 + x) for x in [0, 1].
template <class R>
MR_HD R log1p_of_unit(R x) {
  return log1p(x);
}
// log(1 + e^x), accurate everywhere.
template <class R>
MR_HD R log1pexp(R x) {
  return max(x, R(0)) + log1p_of_unit(exp(-abs(x)));
}
// log(-log(u)), the negative of a Gumbel number, for a random number u of uniform().
template <class R>
MR_HD R log_of_exponential(R u) {
  return log(-log(u));
}
// The result is NaN if either is.
template <class R>
MR_HD R maximum(R x, R y) {
  return select(x > y || x != x, x, y);
}
template <class R>
MR_HD R minimum(R x, R y) {
  return select(x < y || x != x, x, y);
}
// e^x, the weight of an element in a softmax.
template <class R>
MR_HD R weight_of(R x) {
  return exp(x);
}
// e^(x - high - low), where high + low is a log-sum-exp: the softmax probability p. An lse of -inf is
// replaced by 0.
template <class R>
MR_HD R share(R x, R high, R low) {
  return exp_of_difference(x, LogSumExp<R>::origin(high), low);
}

// x as an integer of type I; the nearest one if it does not fit.
template <class I>
MR_HD constexpr I saturated(std::int64_t x) {
  constexpr I kMost = std::numeric_limits<I>::max(), kLeast = -kMost - 1;
  return x > kMost ? kMost : x < kLeast ? kLeast : static_cast<I>(x);
}
// x as plain floating point.
template <class R>
MR_HD Scalar<R> scalar(R x) {
  if constexpr (std::is_arithmetic_v<R>)
    return x;
  else
    return x.x;
}

}  // namespace monoidreduce
