// Turns the weights that a fold saved (saving_epilogue_sm90.cuh) into local gradients (dlogits) in place,
// once the results P_i are known:
//
//   D(P_i, X_ij) = sum_n (factor_in + of_log_i log2 share_ijn) share_ijn + addend_i
//   share = weight * 2^(frame - log-sum-exp)
//
// The share is the softmax probability p. Only the entropy has the term with its logarithm (EntropyTerms). In
// the column of the row's label (the target), at_label replaces the result. Gradients are written in the element
// type, which is as large as a weight.
#pragma once

#include <cuda_fp16.h>

#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/device/contraction/saving_epilogue_sm90.cuh"
#include "monoidreduce/monoids/log_probs.h"

namespace monoidreduce::sm90 {

// The terms of a row's local gradients, as in the formula above. Log-sum-exps are in base 2.
template <int kScores>
struct RowTerms {
  LogNumber<Bits> lse[kScores];
  float factor[kScores];
  float addend = 0.f, at_label = 0.f;
  int label = -1;
};

struct EntropyTerms : RowTerms<1> {
  float of_log = 0.f;
};

// A rows policy that gives the terms of a row. The gradients of a row that is not active are 0.
template <class P, int kScores>
concept TermRows = requires(const P p, std::int64_t row) {
  { p.active(row) } -> std::same_as<bool>;
  RowTerms<kScores>(p.terms(row));  // or a struct with more, as EntropyTerms
};

// The factor by which a saved weight is multiplied. scale = 2^log_scale turns a weight into a softmax
// probability.
template <class Terms>
__device__ __forceinline__ float factor_of_weight(const Terms& terms, int score, float weight,
                                                  float log_scale, float scale) {
  if constexpr (std::is_same_v<Terms, EntropyTerms>) {
    const float log_share = Entropy<Bits>::finite(log2f(weight) + log_scale).x;
    return (terms.factor[score] + terms.of_log * log_share) * scale;
  } else {
    return terms.factor[score] * scale;
  }
}

// Converts the saved weights of one row per block. Lines of weights are in the order of the rows and padded
// to whole vectors.
template <class E, class Kept, class Rows>
__global__ void weights_to_gradients_kernel(const __grid_constant__ Kept kept,
                                            const __grid_constant__ RowOrder order,
                                            const __grid_constant__ Rows rows) {
  static_assert(TermRows<Rows, Kept::kScores> && sizeof(E) == sizeof(typename Kept::Weight));
  constexpr int kVector = sizeof(uint4) / sizeof(E);
  union Vector {
    uint4 words;
    typename Kept::Weight weights[kVector];
    E gradients[kVector];
  };
  const std::int64_t place = blockIdx.x, row = order[static_cast<int>(place)];
  const auto line = [&](int n) { return kept.weights[n] + place * kept.pitch; };
  const bool active = rows.active(row);
  using Terms = decltype(rows.terms(row));
  const Terms terms = active ? rows.terms(row) : Terms{};
  for (int column = threadIdx.x * kVector; column < kept.columns; column += blockDim.x * kVector) {
    float gradients[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) gradients[i] = terms.addend;
    if (active) {
#pragma unroll
      for (int n = 0; n < Kept::kScores; ++n) {
        const float frame = kept.frames[n][place * kept.tiles() + column / Kept::kTileColumns];
        const float high = LogSumExp<Bits>::origin(terms.lse[n].high).x;
        // Where all scores of a row so far were -inf, its frame has nothing to do with the log-sum-exp, and its
        // weights are 0, which must not meet an infinite scale. Any other scale is at most 2^24.
        const float distance = (frame - high) - terms.lse[n].low.x;
        const float log_scale = distance > 64.f ? 64.f : distance, scale = exp2f(log_scale);
        Vector in;
        in.words = *reinterpret_cast<const uint4*>(line(n) + column);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const float weight = static_cast<float>(in.weights[i]);
          gradients[i] += factor_of_weight(terms, n, weight, log_scale, scale) * weight;
        }
      }
    }
    Vector out;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (column + i == terms.label) gradients[i] = terms.at_label;
      if (column + i >= kept.columns) gradients[i] = 0.f;
      out.gradients[i] = static_cast<E>(gradients[i]);
    }
    *reinterpret_cast<uint4*>(line(0) + column) = out.words;
  }
}

}  // namespace monoidreduce::sm90
