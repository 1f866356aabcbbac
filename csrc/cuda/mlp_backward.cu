#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/ops/mlp.h"
#include "operator.h"

namespace monoidreduce::cuda::simt {

template <>
void run(const MlpBackward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients wanted{.grad_out = as_rows(x.grad_out),
                               .d_a = as_rows(x.d_x),
                               .d_b = as_rows(x.d_w1),
                               .d_payload = as_rows(transposed(x.d_w2)),
                               .d_bias = as_column_bias(x.d_bias1, x.x.size[0])};
    fold_backward<true>(NamedSum<T>{{}, x.activation}, mlp_problem(x), SumRows<T>{}, wanted, launch);
  });
}

}  // namespace monoidreduce::cuda::simt
