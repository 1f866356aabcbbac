// What the tensor-core tiers share of the MLP: its monoid, scores and rows.
#pragma once

#include "element.h"
#include "mlp.h"
#include "monoidreduce/block/fast_real.cuh"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/problems.h"
#include "operator.h"

namespace monoidreduce::cuda {

// bias2, added to the result; nothing is kept of a row.
template <class E>
struct MlpRows {
  const E* bias2;  // [payload width], or null
  std::int64_t stride;
  int width;
  template <class P>
  __device__ void store(std::int64_t, P, bool) const {}
  __device__ float output(float sum, int i) const {
    const int d = fragment_column(i);
    return bias2 && d < width ? sum + static_cast<float>(bias2[d * stride]) : sum;
  }
};

// Calls run(E{}, monoid, scores) with those of the call.
template <class Arguments, class Run>
void with_mlp_monoid(const Arguments& x, Run run) {
  with_element(x.x.dtype, [&](auto element) {
    with_activation(x.activation, [&](auto activation) {
      using E = decltype(element);
      using R = Fast<E>;
      const BiasedScores<R, E> scores{data<const E>(x.bias1), x.bias1.stride[0],
                                      static_cast<int>(x.w1.size[0])};
      run(element, Sum<R, decltype(activation)>{}, scores);
    });
  });
}

// run(E{}, monoid, scores, problem, rows, out) folds with a tier's kernel.
template <class Run>
void mlp_forward_pass(const MlpForward& x, Run run) {
  with_mlp_monoid(x, [&](auto element, const auto& monoid, const auto& scores) {
    using E = decltype(element);
    const MlpRows<E> rows{data<const E>(x.bias2), x.bias2.stride[0], static_cast<int>(x.w2.size[0])};
    run(element, monoid, scores, mlp_problem(x), rows, as_rows(x.out));
  });
}

// run(E{}, monoid, scores, problem, wanted) is a tier's backward fold.
template <class Run>
void mlp_backward_pass(const MlpBackward& x, Run run) {
  const FoldGradients wanted{.grad_out = as_rows(x.grad_out),
                             .d_a = as_rows(x.d_x),
                             .d_b = as_rows(x.d_w1),
                             .d_payload = as_rows(transposed(x.d_w2)),
                             .d_bias = x.d_bias1};
  with_mlp_monoid(x, [&](auto element, const auto& monoid, const auto& scores) {
    run(element, monoid, scores, mlp_problem(x), wanted);
  });
}

}  // namespace monoidreduce::cuda
