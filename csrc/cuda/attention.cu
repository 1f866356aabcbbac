#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/launch/row_prologue.cuh"
#include "monoidreduce/launch/sink_gradient.cuh"
#include "monoidreduce/ops/attention.h"
#include "operator.h"

namespace monoidreduce::cuda::simt {

template <>
void run(const AttentionForward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{
        .lse = data<T>(x.lse), .lse_low = data<T>(x.lse_low), .centre = {}, .sinks = data<const T>(x.sinks)};
    fold_forward<true>(LogSumExp<T>{}, attention_problem(x), rows, {x.out, x.out_low}, launch);
  });
}

template <>
void run(const AttentionBackward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    T *of_lse = data<T>(x.scratch), *centre = of_lse + x.q.size[0] * x.q.size[1] * x.q.size[2];
    row_centre<T>(x.grad_out, x.out, x.out_low, x.grad_lse, of_lse, centre, launch);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {centre, 1}, {of_lse, 1}};
    sink_gradient(LogSumExp<T>{}, rows, x, launch);
    const FoldGradients wanted{
        .grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v, .d_bias = x.d_bias};
    fold_backward<true>(LogSumExp<T>{}, attention_problem(x), rows, wanted, launch);
  });
}

}  // namespace monoidreduce::cuda::simt
