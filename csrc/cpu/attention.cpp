// Attention on the CPU: a fold of the values (payload) with the monoid LogSumExp.
#include "monoidreduce/ops/attention.h"
#include "engine.h"
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/rows.h"
#include "row_centres.h"
#include "sink_gradient.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {
template <>
void run(const AttentionForward& x, const Launch& launch) {
  with_accumulator(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{.lse = static_cast<T*>(x.lse.data),
                                .lse_low = static_cast<T*>(x.lse_low.data),
                                .centre = {},
                                .sinks = static_cast<const T*>(x.sinks.data)};
    fold_forward<LogSumExp, T>({}, attention_problem(x), rows, {x.out, x.out_low}, launch.threads);
  });
}

template <>
void run(const AttentionBackward& x, const Launch& launch) {
  with_accumulator(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t count = x.q.size[0] * x.q.size[1] * x.q.size[2];
    Scratch<T> of_lse(count), centre(count);
    row_centres<T>(x.grad_out, x.grad_lse, x.out, x.out_low, launch.threads, of_lse.get(), centre.get());
    const LogSumExpRows<T> rows{
        static_cast<T*>(x.lse.data), static_cast<T*>(x.lse_low.data), {centre.get(), 1}, {of_lse.get(), 1}};
    sink_gradient<T>(rows, x, launch.threads);
    FoldProblem problem = attention_problem(x);
    FoldGradients gradients{.grad_out = x.grad_out,
                            .d_a = x.d_q,
                            .d_b = x.d_k,
                            .d_other_a = {},
                            .d_other_b = {},
                            .d_payload = x.d_v,
                            .d_bias = x.d_bias};
    if (!x.grad_out.present()) {  // only lse has a gradient, and lse does not depend on v
      problem.payload = {};
      gradients.d_payload = {};
      fill_zero(x.d_v);
    }
    fold_backward<LogSumExp, T>({}, problem, rows, gradients, launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
