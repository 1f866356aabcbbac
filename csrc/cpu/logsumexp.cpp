// logsumexp_matmul on the CPU: a fold without a payload.
#include "monoidreduce/monoids/logsumexp.h"
#include "engine.h"
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/ops/logsumexp.h"
#include "monoidreduce/rows.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

template <>
void run(const LogSumExpForward& x, const Launch& launch) {
  with_accumulator(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{static_cast<T*>(x.lse.data), static_cast<T*>(x.lse_low.data), {}};
    fold_forward<LogSumExp, T>({}, logsumexp_problem(x), rows, {}, launch.threads);
  });
}

template <>
void run(const LogSumExpBackward& x, const Launch& launch) {
  with_accumulator(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{static_cast<T*>(x.lse.data), static_cast<T*>(x.lse_low.data),
                                row_vector<T>(x.grad_lse)};
    const FoldGradients gradients{.grad_out = {},
                                  .d_a = as_rows(x.d_a),
                                  .d_b = as_rows(x.d_b),
                                  .d_other_a = {},
                                  .d_other_b = {},
                                  .d_payload = {},
                                  .d_bias = {}};
    fold_backward<LogSumExp, T>({}, logsumexp_problem(x), rows, gradients, launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
