// Log-probabilities of class indices on the CPU.
#include "monoidreduce/ops/log_probs.h"
#include "engine.h"
#include "monoidreduce/cpu/fold.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {
template <>
void run(const LogProbsForward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_log_probs<T>(x, [&](const auto& m) {
      fold_forward(m, cross_entropy_problem(x), log_probs_rows<T>(x), {}, launch.threads);
    });
  });
}

template <>
void run(const LogProbsBackward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients gradients{.grad_out = {},
                                  .d_a = as_rows(x.d_x),
                                  .d_b = as_rows(x.d_weight),
                                  .d_other_a = {},
                                  .d_other_b = {},
                                  .d_payload = {},
                                  .d_bias = as_column_bias(x.d_bias, x.x.size[0])};
    fold_backward(LogProbs<T>{}, cross_entropy_problem(x), log_probs_rows<T>(x), gradients, launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
