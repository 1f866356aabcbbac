// The two-layer MLP on the CPU: a sum over hidden units of activation times payload (a row of w2^T). The hidden layer is never
// stored.
#include "monoidreduce/ops/mlp.h"
#include "engine.h"
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/rows.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

template <>
void run(const MlpForward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    fold_forward<NamedSum, T>({{}, x.activation}, mlp_problem(x, x.bias2), SumRows<T>{}, {as_rows(x.out)},
                              launch.threads);
  });
}

template <>
void run(const MlpBackward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients gradients{.grad_out = as_rows(x.grad_out),
                                  .d_a = as_rows(x.d_x),
                                  .d_b = as_rows(x.d_w1),
                                  .d_other_a = {},
                                  .d_other_b = {},
                                  .d_payload = as_rows(transposed(x.d_w2)),
                                  .d_bias = as_column_bias(x.d_bias1, x.x.size[0])};
    fold_backward<NamedSum, T>({{}, x.activation}, mlp_problem(x), SumRows<T>{}, gradients, launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
