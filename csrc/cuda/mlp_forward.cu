#include "mlp.h"

#include "monoidreduce/launch/combine_splits.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/ops/mlp.h"
#include "operator.h"
#include "tensor_cores.h"
#include "tier.h"

namespace monoidreduce::cuda {
namespace {

// Of the kernels that store no hidden value.
Tier fused_tier(const MlpForward& x, const Launch& launch) {
  const FoldProblem problem = mlp_problem(x);
  Tier tier = fastest_tier(problem, {.sm80 = widest_sm80_forward(problem, true), .sm90 = 256}, launch,
                           {.both = mlp_obstacle(x)});
  std::optional<Packing> packing;
  if (tier.name == kSm80) packing = sm80::mlp_few_rows(problem);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) packing = sm90::mlp_few_rows(problem);
  }
  if (!packing) return tier;
  const bool split = packing->splits > 1;
  if (split) tier.scratch = partial_rows_floats<NamedSum<float>>(problem, packing->splits);
  tier.reason += message("; few rows: tiles of ", packing->rows, " rows, hidden units ",
                         split ? message("in ", packing->splits, " splits") : "not split");
  return tier;
}

}  // namespace

Tier mlp_forward_tier(const MlpForward& given, const Launch& launch) {
  const MlpForward x = padded(given);
  const Tier fused = fused_tier(x, launch);
  const bool whole = fused.name != kSimt;
  return with_padding(whole ? fused : mlp_forward_parts(fused, mlp_problem(x), x.workspace, launch), given);
}

void mlp_forward(const MlpForward& x, const Launch& launch) {
  const Tier tier = fused_tier(x, launch);
  require_scratch(x.scratch, tier);
  if (tier.name == kSm80) sm80::mlp_forward(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::mlp_forward(x, launch);
  }
  if (tier.name != kSimt) return count_tier("mlp_forward", tier, x.x.dtype);
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    fold_forward<true>(NamedSum<T>{{}, x.activation}, mlp_problem(x, x.bias2), SumRows<T>{}, as_rows(x.out),
                       launch);
  });
  count_simt("mlp_forward", x.x.dtype);
}

}  // namespace monoidreduce::cuda
