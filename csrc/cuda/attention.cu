#include "monoidreduce/kernel/fold_backward_simt.cuh"
#include "monoidreduce/kernel/fold_forward_simt.cuh"
#include "monoidreduce/kernel/row_prologue.cuh"
#include "monoidreduce/problems.h"
#include "operator.h"

namespace monoidreduce::cuda {

void attention_forward(const AttentionForward& x, const Launch& launch) {
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {}};
    fold_forward<true>(LogSumExp<T>{}, attention_problem(x), rows, x.out, launch);
  });
  count_simt("attention_forward", x.q.dtype);
}

void attention_backward(const AttentionBackward& x, const Launch& launch) {
  require(x.centre.present(),
          "centre: expected a scratch tensor [B, H, M] of the accumulation type, got none");
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    row_centre<T>(x.grad_out, x.out, x.grad_lse, x.centre, launch);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {data<T>(x.centre), 1}};
    const FoldGradients wanted{
        .grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v, .d_bias = x.d_bias};
    fold_backward<true>(LogSumExp<T>{}, attention_problem(x), rows, wanted, launch);
  });
  count_simt("attention_backward", x.q.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
