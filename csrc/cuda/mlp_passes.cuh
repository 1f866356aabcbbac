// What the tensor-core tiers share for the MLP: its monoid, scores and rows.
#pragma once

#include "element.h"
#include "mlp.h"
#include "monoidreduce/device/arch/async_copy.cuh"
#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/ops/mlp.h"
#include "operator.h"

namespace monoidreduce::cuda {

// The row policy of the forward fold (PayloadRows): adds bias2 to the result, and stores nothing for a row.
template <class E>
struct MlpRows {
  static constexpr bool kLowWords = false;
  const E* bias2;  // [payload width], or null
  std::int64_t stride;
  int width;
  template <class P>
  __device__ void store(std::int64_t, int, P, bool) const {}
  template <int kSize>
  __device__ __forceinline__ void output(float (&sums)[kSize]) const {
    // One moving pointer, and one condition for each load. The addresses of all columns, or a branch around
    // them, took more registers than the sums leave (108 and 540 bytes of spills at width 256). So did values
    // computed from the thread index, if the fragments shared them (44 bytes).
    const int first = arch::thread_again() % 4 * 2, there = bias2 ? width - first : 0;
    const E* at = bias2 + first * stride;
#pragma unroll
    for (int i = 0; i < kSize; i += 4, at += 8 * stride) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = 2 * i + e < there ? static_cast<float>(at[e * stride]) : 0.f;
        sums[i + e] += x, sums[i + e + 2] += x;
      }
    }
  }
  template <int kSize>
  __device__ __forceinline__ void output_of(float (&sums)[kSize], int column0) const {
    if (bias2 == nullptr) return;
#pragma unroll
    for (int d = 0; d < kSize; ++d) sums[d] += static_cast<float>(bias2[(column0 + d) * stride]);
  }
};

// Calls run(E{}, monoid, scores) with the element type, the monoid and the scores of the call.
template <class Elements = Halves, class Arguments, class Run>
void with_mlp_monoid(const Arguments& x, Run run) {
  Elements::with(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    using R = Fast<E>;
    const BiasedScores<R, E> scores{data<const E>(x.bias1), x.bias1.stride[0],
                                    static_cast<int>(x.w1.size[0])};
    run(element, NamedSum<R>{{}, x.activation}, scores);
  });
}

// Calls run(E{}, monoid, scores, problem, rows, out), which must launch a tier's forward fold.
template <class Elements = Halves, class Run>
void mlp_forward_pass(const MlpForward& x, Run run) {
  with_mlp_monoid<Elements>(x, [&](auto element, const auto& monoid, const auto& scores) {
    using E = decltype(element);
    const MlpRows<E> rows{data<const E>(x.bias2), x.bias2.stride[0], static_cast<int>(x.w2.size[0])};
    run(element, monoid, scores, mlp_problem(x), rows, FoldOutput{as_rows(x.out)});
  });
}

// Calls run(E{}, monoid, scores, problem, wanted), which must launch a tier's backward fold.
template <class Elements = Halves, class Run>
void mlp_backward_pass(const MlpBackward& x, Run run) {
  const FoldGradients wanted{.grad_out = as_rows(x.grad_out),
                             .d_a = as_rows(x.d_x),
                             .d_b = as_rows(x.d_w1),
                             .d_payload = as_rows(transposed(x.d_w2)),
                             .d_bias = x.d_bias1};
  with_mlp_monoid<Elements>(x, [&](auto element, const auto& monoid, const auto& scores) {
    run(element, monoid, scores, mlp_problem(x), wanted);
  });
}

}  // namespace monoidreduce::cuda
