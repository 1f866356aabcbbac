#include "linear_losses.h"
#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/ops/cross_entropy.h"
#include "operator.h"
#include "tier.h"

namespace monoidreduce::cuda {
Tier cross_entropy_forward_tier(const CrossEntropyForward& x, const Launch&) {
  Tier tier = contraction_tier(cross_entropy_problem(x));
  if (tier.name == kSm80) tier.scratch = sm80::cross_entropy_forward_scratch(x);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) tier.scratch = sm90::cross_entropy_forward_scratch(x);
  }
  return tier;
}

Tier cross_entropy_backward_tier(const CrossEntropyBackward& x, const Launch& launch) {
  return products_tier(cross_entropy_problem(x), x.workspace, launch);
}

void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch) {
  Tier tier = cuda::cross_entropy_forward_tier(x, launch);
  require(tier.name == kSm90 || !x.kept.present(),
          "kept: expected none on a tier other than sm90, got a tensor");
  require(tier.name == kSm90 || !x.order.present(),
          "order: expected none on a tier other than sm90, got a tensor");
  require_scratch(x.scratch, tier);
  // A row's sums of weights are more than sm_80's tile has registers for: its kernel would spill 116 bytes.
  if (tier.name == kSm80 && weighs_all(x)) tier = {kSimt, "label smoothing has weights of classes"};
  if (tier.name == kSm80) sm80::cross_entropy_forward(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::cross_entropy_forward(x, launch);
  }
  if (x.kept.present()) count_tier("cross_entropy_backward", tier, x.x.dtype);  // whose part it does
  if (tier.name != kSimt) return count_tier("cross_entropy_forward", tier, x.x.dtype);
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_cross_entropy<T>(x, [&](const auto& m) {
      fold_forward<false>(m, cross_entropy_problem(x), cross_entropy_rows<T>(x), {}, launch);
    });
  });
  count_simt("cross_entropy_forward", x.x.dtype);
}

void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Launch& launch) {
  const Tier tier = contraction_tier(cross_entropy_problem(x));
  require(tier.name != kSimt, "x: expected a call on the tier sm80 or sm90, got ", tier.reason);
  require(tier.name == kSm90 || !x.order.present(),
          "order: expected none on a tier other than sm90, got a tensor");
  if (tier.name == kSm80) sm80::cross_entropy_local_gradient(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::cross_entropy_local_gradient(x, launch);
  }
  count_tier("cross_entropy_backward", tier, x.x.dtype);
}

void cross_entropy_backward(const CrossEntropyBackward& x, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients wanted{
        .d_a = as_rows(x.d_x), .d_b = as_rows(x.d_weight), .d_bias = as_column_bias(x.d_bias, x.x.size[0])};
    with_cross_entropy<T>(x, [&](const auto& m) {
      fold_backward<false>(m, cross_entropy_problem(x), cross_entropy_rows<T>(x), wanted, launch);
    });
  });
  count_simt("cross_entropy_backward", x.x.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
