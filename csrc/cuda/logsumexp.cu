#include "monoidreduce/kernel/fold_backward_simt.cuh"
#include "monoidreduce/kernel/fold_forward_simt.cuh"
#include "monoidreduce/problems.h"
#include "operator.h"

namespace monoidreduce::cuda {

void logsumexp_forward(const LogSumExpForward& x, const Launch& launch) {
  with_accumulation(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {}};
    fold_forward<false>(LogSumExp<T>{}, logsumexp_problem(x), rows, {}, launch);
  });
  count_simt("logsumexp_forward", x.a.dtype);
}

void logsumexp_backward(const LogSumExpBackward& x, const Launch& launch) {
  with_accumulation(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), row_vector<T>(x.grad_lse)};
    const FoldGradients wanted{.d_a = as_rows(x.d_a), .d_b = as_rows(x.d_b)};
    fold_backward<false>(LogSumExp<T>{}, logsumexp_problem(x), rows, wanted, launch);
  });
  count_simt("logsumexp_backward", x.a.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
