// What the resident kernels store for each row of attention: the log-sum-exp.
#pragma once

#include <cmath>
#include <cstdint>

#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce {

// A row that must be computed again (repair.cuh) has NaN as log-sum-exp until then. The low word is 0:
// weights in 16 bits or tf32 do not need it.
struct AttentionRows {
  static constexpr bool kLowWords = true;
  float *lse, *lse_low;  // [rows], natural logarithm
  const float* sinks;    // [heads], or null
  __device__ bool has_sinks() const { return sinks != nullptr; }
  __device__ Bits sink(std::int64_t head) const { return sinks[head] * float(kLog2E); }
  __device__ void store(std::int64_t row, int head, LogNumber<Bits> p, bool right) const {
    // If a row keeps no columns, its log-sum-exp is the sink itself: converting that to base 2 and back would
    // round it.
    const bool alone = has_sinks() && p.high == sink(head) && p.low == 0.f;
    const float natural = alone ? sinks[head] : fmaf(p.high.x, float(kLn2), p.low.x * float(kLn2));
    lse[row] = right ? natural : NAN;
    lse_low[row] = 0.f;
  }
  template <int kSize>
  __device__ __forceinline__ void output(float (&)[kSize]) const {}
  template <int kSize>
  __device__ __forceinline__ void output_of(float (&)[kSize], int) const {}
};

// The same where log-sum-exps have both words, in natural units.
struct FullAttentionRows {
  static constexpr bool kLowWords = false;
  float *lse, *lse_low;  // [rows]
  const float* sinks;    // [heads], or null
  __device__ bool has_sinks() const { return sinks != nullptr; }
  __device__ Full sink(std::int64_t head) const { return sinks[head]; }
  __device__ void store(std::int64_t row, int, LogNumber<Full> p, bool right) const {
    lse[row] = right ? p.high.x : NAN;
    lse_low[row] = p.low.x;
  }
  template <int kSize>
  __device__ __forceinline__ void output(float (&)[kSize]) const {}
  template <int kSize>
  __device__ __forceinline__ void output_of(float (&)[kSize], int) const {}
};

// The row policy for rows that are computed again (repair.cuh).
struct RepairedAttentionRows {
  float *lse, *lse_low;
  const float* sinks;  // [heads], or null
  __device__ bool has_sinks() const { return sinks != nullptr; }
  __device__ double sink(std::int64_t head) const { return sinks[head]; }
  __device__ bool marked(std::int64_t row) const { return isnan(lse[row]); }
  __device__ void store(std::int64_t row, LogNumber<double> p) const {
    const LogNumber<float> kept = rounded<float>(p);
    lse[row] = kept.high, lse_low[row] = kept.low;
  }
};

}  // namespace monoidreduce
