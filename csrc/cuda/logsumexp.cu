#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/ops/logsumexp.h"
#include "operator.h"
#include "simt_splits.cuh"

namespace monoidreduce::cuda::simt {

template <>
void run(const LogSumExpForward& x, const Plan& plan, const Launch& launch) {
  with_accumulation(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {}};
    fold_forward<false>(LogSumExp<T>{}, logsumexp_problem(x), rows, {}, launch, splits_of(plan, x.scratch));
  });
}

template <>
void run(const LogSumExpBackward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), row_vector<T>(x.grad_lse)};
    const FoldGradients wanted{.d_a = as_rows(x.d_a), .d_b = as_rows(x.d_b)};
    fold_backward<false>(LogSumExp<T>{}, logsumexp_problem(x), rows, wanted, launch);
  });
}

}  // namespace monoidreduce::cuda::simt
