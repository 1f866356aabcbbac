#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/ops/mlp.h"
#include "operator.h"

namespace monoidreduce::cuda::simt {

template <>
void run(const MlpForward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    fold_forward<true>(NamedSum<T>{{}, x.activation}, mlp_problem(x, x.bias2), SumRows<T>{}, {as_rows(x.out)},
                       launch);
  });
}

}  // namespace monoidreduce::cuda::simt
