#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/ops/log_probs.h"
#include "operator.h"

namespace monoidreduce::cuda::simt {

template <>
void run(const LogProbsForward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_log_probs<T>(x, [&](const auto& m) {
      fold_forward<false>(m, cross_entropy_problem(x), log_probs_rows<T>(x), {}, launch);
    });
  });
}

template <>
void run(const LogProbsBackward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients wanted{
        .d_a = as_rows(x.d_x), .d_b = as_rows(x.d_weight), .d_bias = as_column_bias(x.d_bias, x.x.size[0])};
    fold_backward<false>(LogProbs<T>{}, cross_entropy_problem(x), log_probs_rows<T>(x), wanted, launch);
  });
}

}  // namespace monoidreduce::cuda::simt
