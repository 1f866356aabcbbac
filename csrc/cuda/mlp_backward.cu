#include "mlp.h"
#include "monoidreduce/kernel/fold_backward_simt.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/problems.h"

namespace monoidreduce::cuda {

void mlp_backward(const MlpBackward& x, const Launch& launch) {
  with_activation(x.x.dtype, x.activation, [&](auto zero, auto activation) {
    using T = decltype(zero);
    const FoldGradients wanted{.grad_out = as_rows(x.grad_out),
                               .d_a = as_rows(x.d_x),
                               .d_b = as_rows(x.d_w1),
                               .d_payload = as_rows(transposed(x.d_w2)),
                               .d_bias = as_column_bias(x.d_bias1, x.x.size[0])};
    fold_backward<true>(Sum<T, decltype(activation)>{}, mlp_problem(x), SumRows<T>{}, wanted, launch);
  });
  count_simt("mlp_backward", x.x.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
