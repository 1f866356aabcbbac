#include "mlp.h"

#include "monoidreduce/kernel/fold_forward_simt.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/problems.h"
#include "operator.h"
#include "sm90/mlp.h"
#include "tier.h"

namespace monoidreduce::cuda {

Tier mlp_forward_tier(const MlpForward& x, const Launch&) {
  return tier_of(mlp_obstacle(x, sm90::kWidestForward));
}

void mlp_forward(const MlpForward& x, const Launch& launch) {
  if constexpr (kWithSm90) {
    if (cuda::mlp_forward_tier(x, launch).name == kSm90) {
      sm90::mlp_forward(x, launch);
      return count_sm90("mlp_forward", x.x.dtype);
    }
  }
  with_accumulation(x.x.dtype, [&](auto zero) {
    with_activation(x.activation, [&](auto activation) {
      using T = decltype(zero);
      fold_forward<true>(Sum<T, decltype(activation)>{}, mlp_problem(x, x.bias2), SumRows<T>{},
                         as_rows(x.out), launch);
    });
  });
  count_simt("mlp_forward", x.x.dtype);
}

}  // namespace monoidreduce::cuda
