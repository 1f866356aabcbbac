// Converts numbers of a row between base 2 (Bits, device/block/fast_real.cuh) and natural units. In double:
// that costs nothing here, and a log-sum-exp keeps both of its words. Products are rounded by themselves,
// never fused with a difference: equal numbers must stay equal. When ptxas fused them, a target with all of
// its row's probability had a loss of 6e-13, and with a scale of 2^100 infinite gradients.
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

// From this magnitude on, the words of a log-sum-exp lose more than 2^-9 when they are converted. There it is
// that of a single score, and the low word is dropped.
inline constexpr float kFarthestLow = 0x1p40f;

__device__ __forceinline__ LogNumber<Bits> bits(LogNumber<float> lse) {
  const auto x = rounded<float>(LogNumber<double>{(double{lse.high} + lse.low) * kLog2E, 0.});
  return {x.high, fabsf(x.high) < kFarthestLow ? x.low : 0.f};
}

// Whether a row's log-sum-exp is so large that its scores must be rounded (kLargeScore of
// device/block/fold_fragment.cuh). Not if it is the largest finite number or infinite: then its scores weigh
// nothing, or one of them is +inf.
template <class R>
__device__ __forceinline__ bool is_large(LogNumber<R> lse) {
  return fabsf(lse.high.x) >= kLargeScore && lse.high.x < kLargest<float>;
}

}  // namespace monoidreduce::cuda
