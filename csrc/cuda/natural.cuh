// Between bits (device/block/fast_real.cuh) and natural units, for numbers of a row. In double: it costs nothing, and a
// log-sum-exp keeps both of its words. Products are rounded, never fused with a difference: equal numbers must stay equal.
// ptxas fuses others. Then a target that is all of its row had a loss of 6e-13, and with a scale of 2^100 infinite gradients.
#pragma once

#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce::cuda {

template <class R>
__device__ __forceinline__ double natural(R x) {
  return __dmul_rn(x.x, kLn2);
}
__device__ __forceinline__ LogSumExp<double>::State natural(LogSumExp<Bits>::State s) {
  return {natural(s.frame), static_cast<double>(s.mass.x)};
}

// The words of a larger number lose more than 2^-9 on the way between units. There the score that it is of stands alone.
inline constexpr float kFarthestLow = 0x1p40f;

__device__ __forceinline__ LogNumber<Bits> bits(LogNumber<float> lse) {
  const auto x = rounded<float>(LogNumber<double>{(double{lse.high} + lse.low) * kLog2E, 0.});
  return {x.high, fabsf(x.high) < kFarthestLow ? x.low : 0.f};
}

// Is a row's log-sum-exp so large that its scores must be rounded (device/block/fold_fragment.cuh). Not if it is the largest number or
// infinite: then its scores weigh nothing, or are beside one of +inf.
template <class R>
__device__ __forceinline__ bool is_far(LogNumber<R> lse) {
  return fabsf(lse.high.x) >= kFarScore && lse.high.x < kLargest<float>;
}

}  // namespace monoidreduce::cuda
