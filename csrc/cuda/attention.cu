#include "monoidreduce/checks.h"
#include "monoidreduce/kernel/fold_backward_simt.cuh"
#include "monoidreduce/kernel/fold_forward_simt.cuh"
#include "monoidreduce/kernel/row_prologue.cuh"
#include "monoidreduce/kernel/tensor_map.cuh"
#include "monoidreduce/problems.h"
#include "operator.h"
#include "sm90/attention.h"
#include "tier.h"

namespace monoidreduce::cuda {
Tier attention_forward_tier(const AttentionForward& x, const Launch&) {
  Tier tier = tier_of(sm90_obstacle(attention_problem(x), sm90::kWidestForward));
  tier.scratch = tier.name == kSm90 && !attention_problem(x).range.all();
  return tier;
}

Tier attention_backward_tier(const AttentionBackward& x, const Launch& launch) {
  std::string obstacle = sm90_obstacle(attention_problem(x), sm90::kWidestBackward);
  if (obstacle.empty()) {
    if (launch.deterministic) {
      obstacle = "the deterministic mode is asked for";
    } else if (!x.grad_out.present()) {
      obstacle = "only the log-sum-exp has a gradient";
    }
  }
  Tier tier = tier_of(obstacle);
  tier.scratch = x.q.size[0] * x.q.size[1] * x.q.size[2];
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) tier.scratch = sm90::attention_backward_scratch(x);
  }
  return tier;
}

void attention_forward(const AttentionForward& x, const Launch& launch) {
  if constexpr (kWithSm90) {
    const Tier tier = cuda::attention_forward_tier(x, launch);
    if (tier.name == kSm90) {
      require(x.counter.numel() >= tier.scratch, "counter: expected a tensor of ", tier.scratch,
              " zeros, got ", x.counter.numel());
      sm90::attention_forward(x, launch);
      return count_sm90("attention_forward", x.q.dtype);
    }
  }
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {}};
    fold_forward<true>(LogSumExp<T>{}, attention_problem(x), rows, x.out, launch);
  });
  count_simt("attention_forward", x.q.dtype);
}

void attention_backward(const AttentionBackward& x, const Launch& launch) {
  const Tier tier = cuda::attention_backward_tier(x, launch);
  const bool simt = tier.name == kSimt;
  require(x.scratch.numel() >= tier.scratch, "scratch: expected ", tier.scratch, " elements, got ",
          x.scratch.numel());
  for (const TensorView* gradient : {&x.d_k, &x.d_v}) {
    const DType expected = simt ? accumulation(x.q.dtype) : x.q.dtype;
    require(!gradient->present() || gradient->dtype == expected, "dk, dv: expected ", name(expected),
            ", as attention_backward_tier says, got ", name(gradient->dtype));
  }
  if constexpr (kWithSm90) {
    if (!simt) {
      sm90::attention_backward(x, launch);
      return count_sm90("attention_backward", x.q.dtype);
    }
  }
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    TensorView centre = x.scratch;  // as [B, H, M]
    centre.rank = 3;
    centre.size[0] = x.q.size[0], centre.size[1] = x.q.size[1], centre.size[2] = x.q.size[2];
    centre.stride[2] = 1, centre.stride[1] = centre.size[2],
    centre.stride[0] = centre.size[1] * centre.size[2];
    row_centre<T>(x.grad_out, x.out, x.grad_lse, centre, launch);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {data<T>(x.scratch), 1}};
    const FoldGradients wanted{
        .grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v, .d_bias = x.d_bias};
    fold_backward<true>(LogSumExp<T>{}, attention_problem(x), rows, wanted, launch);
  });
  count_simt("attention_backward", x.q.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
