// What the tensor-core tiers share for a narrow logsumexp_matmul (Plan::narrow: up to 128 wide), whose
// gradients are folds with a payload. With the softmax probabilities p_ij = exp(x_ij - lse_i), upstream
// gradients g_i and the scale s of scores:
//
//   mean_i = sum_j p_ij b_j           the forward pass: attention, with b for keys and values
//   d_a_i  = g_i s mean_i             needs no scores
//   d_b_j  = sum_i p_ij g_i s a_i     folds rows of a into rows of b; lse_i is known, so no row max is needed
#pragma once

#include <cmath>

#include "../plan/tiles.h"
#include "element.h"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/device/resident/row_residuals.cuh"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/ops/logsumexp.h"
#include "natural.cuh"
#include "operator.h"

namespace monoidreduce::cuda {

// The row policy of the forward pass (PayloadRows).
struct MeanRows {
  static constexpr bool kLowWords = false;
  float *lse, *lse_low;  // [rows]
  __device__ void store(std::int64_t row, int, LogNumber<Bits> p, bool) const {
    const auto kept = rounded<float>(LogNumber<double>{p.high.x * kLn2, p.low.x * kLn2});
    lse[row] = kept.high, lse_low[row] = kept.low;
  }
  template <int kSize>
  __device__ __forceinline__ void output(float (&)[kSize]) const {}
  template <int kSize>
  __device__ __forceinline__ void output_of(float (&)[kSize], int) const {}
};

// Calls run(E{}, monoid, scores, problem, rows, out), which must launch a tier's forward fold.
template <class Run>
void logsumexp_mean_pass(const LogSumExpForward& x, Run run) {
  FoldProblem problem = logsumexp_problem(x);
  problem.payload = problem.b;
  const MeanRows rows{data<float>(x.lse), data<float>(x.lse_low)};
  with_element(x.a.dtype, [&](auto element) {
    run(element, LogSumExp<Bits>{}, ScaledScores<Bits>(problem.score, kLog2E), problem, rows,
        FoldOutput{as_rows(x.mean)});
  });
}

// What the fold of d_b reads of a row of a: how much the row weighs.
struct alignas(8) ShareOfRow {
  float lse;       // in base 2; its low word is part of the factor
  float upstream;  // g_i s, corrected by the low word of lse
};
// The above for all rows of a, padded to whole units; rows beyond the last weigh nothing.
struct Shares {
  static constexpr int kUnit = tiles::kNarrowUnit;
  ShareOfRow* rows;
  // One for each unit of rows: not 0 if some row has so large a log-sum-exp that its scores must be rounded
  // (is_large).
  float* far;

  __host__ __device__ static Shares in(float* scratch, std::int64_t padded_rows) {
    return {reinterpret_cast<ShareOfRow*>(scratch), scratch + 2 * padded_rows};
  }
};

// The score policy of d_b (FragmentScores); its columns are rows of a. A dot product becomes its weight p_ij
// g_i s. A score is not rounded before the log-sum-exp is subtracted, unless the log-sum-exp is one of
// rounded scores. For a score of 2^20, rounding it would cost 6 % of p.
struct ShareScores {
  static constexpr bool kMonotone = false;
  float scale;
  Shares shares;
  __device__ __forceinline__ const ShareScores& of_head(int, int) const { return *this; }
  template <int kSize>
  __device__ __forceinline__ void prepare(float (&tile)[kSize], int, int column0) const {
    static_assert(Shares::kUnit % (2 * kSize) == 0);
    const auto* const at = reinterpret_cast<const float4*>(shares.rows + column0 + fragment_column(0));
    const auto weigh = [&](auto difference) {
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
        const float4 two = __ldg(at + i);  // for two columns, which a thread has in both of its rows
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
          tile[i + r] = arch::exp2(difference(tile[i + r], two.x)) * two.y;
          tile[i + r + 1] = arch::exp2(difference(tile[i + r + 1], two.z)) * two.w;
        }
      }
    };
    const auto fused = [&](float dot, float lse) { return fmaf(dot, scale, -lse); };
    if (__ldg(shares.far + column0 / Shares::kUnit) == 0.f) return weigh(fused);
    weigh([&](float dot, float lse) {
      return fabsf(lse) < kLargeScore ? fused(dot, lse) : __fmul_rn(dot, scale) - lse;
    });
  }
  __device__ __forceinline__ Bits value(Bits weight, int) const { return weight; }
  __device__ __forceinline__ Bits rounded(Bits weight) const { return weight; }
};

// The monoid of d_b: the sum of scores that are weights.
struct WeightSum : Sum<Bits> {
  MR_HD Bits absent() const { return 0.f; }
};

// The row policy of d_b (PayloadRows): nothing is stored for a row.
struct GradientRows {
  static constexpr bool kLowWords = false;
  __device__ void store(std::int64_t, int, Bits, bool) const {}
  template <int kSize>
  __device__ __forceinline__ void output(float (&)[kSize]) const {}
  template <int kSize>
  __device__ __forceinline__ void output_of(float (&)[kSize], int) const {}
};

// The inputs of logsumexp_rows. Widths are multiples of 8.
template <class E>
struct LogSumExpRowInputs {
  RowVector<float> grad_lse;
  const float *lse, *lse_low;
  const E* mean;  // [rows, width]
  E* d_a;         // [rows, width], or null
  Shares shares;  // rows: null if d_b is not wanted
  std::int64_t rows;
  int width;
  float scale;
};

inline constexpr int kLanesOfNarrowRow = tiles::kWidestNarrow / kChunk;

// Computes d_a, and what the fold of d_b needs of a row. A block takes one unit of rows.
template <class E>
__global__ void __launch_bounds__(kPrepareThreads)
    logsumexp_rows(const __grid_constant__ LogSumExpRowInputs<E> x) {
  const int lane = threadIdx.x % kLanesOfNarrowRow, first = lane * kChunk;
  bool far = false;
  for (int n = threadIdx.x / kLanesOfNarrowRow; n < Shares::kUnit; n += kPrepareThreads / kLanesOfNarrowRow) {
    const std::int64_t row = std::int64_t{blockIdx.x} * Shares::kUnit + n;
    const bool there = row < x.rows;
    const float upstream = there ? x.grad_lse[row] * x.scale : 0.f;
    if (x.shares.rows && lane == 0) {
      const LogNumber<Bits> lse =
          there ? bits({x.lse[row], x.lse_low[row]}) : LogNumber<Bits>{infinity<Bits>(), 0.f};
      x.shares.rows[row] = {LogSumExp<Bits>::origin(lse.high).x, upstream * ::exp2f(-lse.low.x)};
      far = far || is_large(lse);
    }
    if (x.d_a == nullptr || !there || first >= x.width) continue;
    float values[kChunk];
    load_chunk<E>(values, x.mean + row * x.width + first);
#pragma unroll
    for (int k = 0; k < kChunk; k += 2)
      store_pair(x.d_a + row * x.width + first + k, upstream * values[k], upstream * values[k + 1]);
  }
  if (x.shares.rows == nullptr) return;
  far = __syncthreads_or(far);
  if (threadIdx.x == 0) x.shares.far[blockIdx.x] = far ? 1.f : 0.f;
}

// Computes d_a and d_b. run(E{}, monoid, scores, problem, rows, out) must launch a tier's forward fold.
template <class Run>
void logsumexp_gradient_folds(const LogSumExpBackward& x, const Launch& launch, Run run) {
  const FoldProblem scores = logsumexp_problem(x);
  const std::int64_t rows = scores.rows(), padded_rows = tiles::narrow_rows(rows);
  const Shares shares = x.d_b.present() ? Shares::in(data<float>(x.scratch), padded_rows) : Shares{};
  const DeviceGuard device(x.a.cuda_device);
  with_element(x.a.dtype, [&](auto element) {
    using E = decltype(element);
    launch_kernel("logsumexp_rows", &logsumexp_rows<E>, blocks_for(padded_rows / Shares::kUnit),
                  kPrepareThreads, 0, launch.stream,
                  LogSumExpRowInputs<E>{row_vector<float>(x.grad_lse), data<float>(x.lse),
                                        data<float>(x.lse_low), data<E>(x.mean), data<E>(x.d_a), shares, rows,
                                        static_cast<int>(scores.width()), static_cast<float>(x.scale)});
    if (!x.d_b.present()) return;
    const FoldProblem folded{.a = scores.b, .b = scores.a, .payload = scores.a, .score = scores.score};
    const auto in_bits = static_cast<float>(x.scale * kLog2E);
    run(element, WeightSum{}, ShareScores{in_bits, shares}, folded, GradientRows{},
        FoldOutput{as_rows(x.d_b)});
  });
}

}  // namespace monoidreduce::cuda
