#include "linear_losses.h"
#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/ops/logsumexp.h"
#include "operator.h"
#include "tier.h"

namespace monoidreduce::cuda {

Tier logsumexp_forward_tier(const LogSumExpForward& x, const Launch&) {
  Tier tier = contraction_tier(logsumexp_problem(x));
  if (tier.name == kSm80) tier.scratch = sm80::logsumexp_forward_scratch(x);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) tier.scratch = sm90::logsumexp_forward_scratch(x);
  }
  return tier;
}

Tier logsumexp_backward_tier(const LogSumExpBackward& x, const Launch& launch) {
  return products_tier(logsumexp_problem(x), x.workspace, launch);
}

void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Launch& launch) {
  const Tier tier = contraction_tier(logsumexp_problem(x));
  require(tier.name != kSimt, "a: expected a call on the tier sm80 or sm90, got ", tier.reason);
  if (tier.name == kSm80) sm80::logsumexp_local_gradient(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::logsumexp_local_gradient(x, launch);
  }
  count_tier("logsumexp_backward", tier, x.a.dtype);
}

void logsumexp_forward(const LogSumExpForward& x, const Launch& launch) {
  const Tier tier = cuda::logsumexp_forward_tier(x, launch);
  require_scratch(x.scratch, tier);
  if (tier.name == kSm80) sm80::logsumexp_forward(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::logsumexp_forward(x, launch);
  }
  if (tier.name != kSimt) return count_tier("logsumexp_forward", tier, x.a.dtype);
  with_accumulation(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {}};
    fold_forward<false>(LogSumExp<T>{}, logsumexp_problem(x), rows, {}, launch);
  });
  count_simt("logsumexp_forward", x.a.dtype);
}

void logsumexp_backward(const LogSumExpBackward& x, const Launch& launch) {
  with_accumulation(x.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), row_vector<T>(x.grad_lse)};
    const FoldGradients wanted{.d_a = as_rows(x.d_a), .d_b = as_rows(x.d_b)};
    fold_backward<false>(LogSumExp<T>{}, logsumexp_problem(x), rows, wanted, launch);
  });
  count_simt("logsumexp_backward", x.a.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
