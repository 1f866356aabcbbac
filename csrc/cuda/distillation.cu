#include "linear_losses.h"
#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/ops/distillation.h"
#include "operator.h"
#include "tier.h"

namespace monoidreduce::cuda {
namespace {

template <class T, class Arguments>
DistillationRows<T> rows_of(const Arguments& x) {
  return {.mask = data<bool>(x.mask),
          .mask_stride = x.mask.stride[0],
          .rows = x.x.size[0],
          .loss = nullptr,
          .stats = data<T>(x.stats),
          .grad_loss = {}};
}

}  // namespace

Tier distillation_forward_tier(const DistillationForward& x, const Launch&) {
  Tier tier = contraction_tier(distillation_problem(x));
  if (tier.name == kSm80) tier.scratch = sm80::distillation_forward_scratch(x);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) tier.scratch = sm90::distillation_forward_scratch(x);
  }
  return tier;
}

Tier distillation_backward_tier(const DistillationBackward& x, const Launch& launch) {
  return products_tier(distillation_problem(x), x.workspace, launch);
}

void distillation_local_gradient(const DistillationLocalGradient& x, const Launch& launch) {
  const Tier tier = contraction_tier(distillation_problem(x));
  require(tier.name != kSimt, "x: expected a call on the tier sm80 or sm90, got ", tier.reason);
  require(tier.name == kSm90 || !x.order.present(),
          "order: expected none on a tier other than sm90, got a tensor");
  if (tier.name == kSm80) sm80::distillation_local_gradient(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::distillation_local_gradient(x, launch);
  }
  count_tier("distillation_backward", tier, x.x.dtype);
}

void distillation_forward(const DistillationForward& x, const Launch& launch) {
  const Tier tier = cuda::distillation_forward_tier(x, launch);
  require(tier.name == kSm90 || !x.kept.present(),
          "kept: expected none on a tier other than sm90, got a tensor");
  require(tier.name == kSm90 || !x.order.present(),
          "order: expected none on a tier other than sm90, got a tensor");
  require_scratch(x.scratch, tier);
  if (tier.name == kSm80) sm80::distillation_forward(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::distillation_forward(x, launch);
  }
  if (x.kept.present()) count_tier("distillation_backward", tier, x.x.dtype);  // whose part it does
  if (tier.name != kSimt) return count_tier("distillation_forward", tier, x.x.dtype);
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto rows = rows_of<T>(x);
    rows.loss = data<T>(x.loss);
    fold_forward<false>(NamedDistillation<T>{{}, x.options.loss}, distillation_problem(x), rows, {}, launch);
  });
  count_simt("distillation_forward", x.x.dtype);
}

void distillation_backward(const DistillationBackward& x, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto rows = rows_of<T>(x);
    rows.grad_loss = row_vector<T>(x.grad_loss);
    const FoldGradients wanted{.d_a = as_rows(x.d_x),
                               .d_b = as_rows(x.d_weight),
                               .d_other_a = as_rows(x.d_teacher_x),
                               .d_other_b = as_rows(x.d_teacher_weight)};
    fold_backward<false>(NamedDistillation<T>{{}, x.options.loss}, distillation_problem(x), rows, wanted,
                         launch);
  });
  count_simt("distillation_backward", x.x.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
