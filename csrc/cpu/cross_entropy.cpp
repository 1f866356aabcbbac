// Linear cross entropy against class indices on the CPU.
#include "monoidreduce/ops/cross_entropy.h"
#include "engine.h"
#include "monoidreduce/cpu/fold.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {
template <>
void run(const CrossEntropyForward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_cross_entropy<T>(x, [&](const auto& m) {
      fold_forward(m, cross_entropy_problem(x), cross_entropy_rows<T>(x), {}, launch.threads);
    });
  });
}

template <>
void run(const CrossEntropyBackward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients gradients{.grad_out = {},
                                  .d_a = as_rows(x.d_x),
                                  .d_b = as_rows(x.d_weight),
                                  .d_other_a = {},
                                  .d_other_b = {},
                                  .d_payload = {},
                                  .d_bias = as_column_bias(x.d_bias, x.x.size[0])};
    with_cross_entropy<T>(x, [&](const auto& m) {
      fold_backward(m, cross_entropy_problem(x), cross_entropy_rows<T>(x), gradients, launch.threads);
    });
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
