// Turns the weights that a fold stored (keeping_epilogue_sm90.cuh) into local gradients (dlogits) in place, once the
// products P_i are known:
//
//   D(P_i, X_ij) = sum_n factor_in share_ijn + addend_i,   share = weight * 2^(frame - log-sum-exp)
//
// The column of the row's label gets another addend. Weights are read as float16, gradients written in the element type.
#pragma once

#include <cuda_fp16.h>

#include "monoidreduce/block/fast_real.cuh"
#include "monoidreduce/kernel/keeping_epilogue_sm90.cuh"
#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce::sm90 {

// The terms of a row's local gradients. Log-sum-exps are in base 2.
template <int kScores>
struct RowTerms {
  LogNumber<Bits> lse[kScores];
  float factor[kScores];
  float addend = 0.f, at_label = 0.f;
  int label = -1;
};

// The stored weights of some rows. Rows: active(row), else the row's gradients are 0; and terms(row).
template <class E, int kScores, int kTileColumns, class Rows>
struct WeightsToGradients {
  KeptWeights<kScores, kTileColumns> kept;
  RowOrder order;
  Rows rows;

  // The work of one of `workers` warps. Lines of weights are in the order of rows; a warp takes a segment of a line.
  __device__ __forceinline__ void run(int worker, int workers) const {
    const int stretches = (kept.columns + kStretch - 1) / kStretch;
#pragma unroll 1
    for (int work = worker; work < order.rows * stretches; work += workers) {
      const int place = work / stretches, begin = work % stretches * kStretch;
      const std::int64_t row = order[place];
      const bool active = rows.active(row);
      const RowTerms<kScores> terms = active ? rows.terms(row) : RowTerms<kScores>{};
      convert(place, begin, ::min(begin + kStretch, kept.columns), active, terms);
    }
  }

 private:
  static constexpr int kVector = 8, kStretch = 16384, kAtATime = 3;
  union Vector {
    uint4 words;
    __half2 weights[kVector / 2];
    E gradients[kVector];
  };

  // Columns [begin, end) of a line, which is padded to whole vectors. A few vectors of every thread are on their way at a time:
  // these warps are few, and what they wait for is memory.
  __device__ __forceinline__ void convert(std::int64_t place, int begin, int end, bool active,
                                          const RowTerms<kScores>& terms) const {
    E* const gradients = reinterpret_cast<E*>(kept.weights[0] + place * kept.pitch);
    const float* const frames[] = {kept.frames[0] + place * kept.tiles(),
                                   kept.frames[kScores - 1] + place * kept.tiles()};
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = begin + lane * kVector; first < end; first += kAtATime * 32 * kVector) {
      uint4 in[kAtATime][kScores] = {};
      float frame[kAtATime][kScores] = {};
#pragma unroll
      for (int k = 0; k < kAtATime; ++k) {
        const int column = first + k * 32 * kVector;
        if (!active || column >= end) continue;
#pragma unroll
        for (int n = 0; n < kScores; ++n) {
          in[k][n] = __ldcs(reinterpret_cast<const uint4*>(kept.weights[n] + place * kept.pitch + column));
          frame[k][n] = frames[n][column / kTileColumns];
        }
      }
#pragma unroll
      for (int k = 0; k < kAtATime; ++k) {
        const int column = first + k * 32 * kVector;
        if (column < end)
          __stcs(reinterpret_cast<uint4*>(gradients + column), gradients_of(in[k], frame[k], terms));
      }
    }
    // By who wrote the vector.
    const auto mine = [&](int column) { return column / kVector % 32 == lane; };
    if (begin <= terms.label && terms.label < end && mine(terms.label))
      gradients[terms.label] = static_cast<E>(terms.at_label);
    for (int column = end; column % kVector != 0; ++column)
      if (mine(column)) gradients[column] = static_cast<E>(0.f);
  }

  __device__ __forceinline__ static uint4 gradients_of(const uint4 (&words)[kScores],
                                                       const float (&frame)[kScores],
                                                       const RowTerms<kScores>& terms) {
    Vector in, out;
    float2 sums[kVector / 2];
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) sums[i] = {terms.addend, terms.addend};
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      const float high = LogSumExp<Bits>::origin(terms.lse[n].high).x;
      const float factor = terms.factor[n] * exp2f((frame[n] - high) - terms.lse[n].low.x);
      in.words = words[n];
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        const float2 weights = __half22float2(in.weights[i]);
        sums[i].x += factor * weights.x;
        sums[i].y += factor * weights.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      out.gradients[2 * i] = static_cast<E>(sums[i].x);
      out.gradients[2 * i + 1] = static_cast<E>(sums[i].y);
    }
    return out.words;
  }
};

template <class Work>
__global__ void weights_to_gradients_kernel(const __grid_constant__ Work work) {
  const int warps = blockDim.x / 32;
  work.run(blockIdx.x * warps + threadIdx.x / 32, gridDim.x * warps);
}

template <class Work>
void weights_to_gradients(const Work& work, int device, const Launch& launch) {
  const DeviceGuard guard(device);
  launch_kernel("weights_to_gradients", &weights_to_gradients_kernel<Work>, multiprocessors(device) * 8, 256,
                0, launch.stream, work);
}

}  // namespace monoidreduce::sm90
