#include "mlp.h"
#include "monoidreduce/kernel/fold_forward_simt.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/problems.h"

namespace monoidreduce::cuda {

void mlp_forward(const MlpForward& x, const Launch& launch) {
  with_activation(x.x.dtype, x.activation, [&](auto zero, auto activation) {
    using T = decltype(zero);
    fold_forward<true>(Sum<T, decltype(activation)>{}, mlp_problem(x, x.bias2), SumRows<T>{}, as_rows(x.out),
                       launch);
  });
  count_simt("mlp_forward", x.x.dtype);
}

}  // namespace monoidreduce::cuda
