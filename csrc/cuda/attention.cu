#include "attention_passes.cuh"
#include "monoidreduce/launch/dense_lines.h"
#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/launch/row_prologue.cuh"
#include "monoidreduce/ops/attention.h"
#include "operator.h"
#include "tensor_cores.h"
#include "tier.h"

namespace monoidreduce::cuda {
namespace {

// The call with operands that are padded, if they need to be.
template <class Arguments>
Arguments padded(const Arguments& given) {
  Arguments x = given;
  for (TensorView* t : {&x.q, &x.k, &x.v}) t->size[3] = padded_size(t->size[3]);
  if constexpr (requires { x.grad_out; }) x.grad_out.size[3] = x.v.size[3];
  return x;
}
template <class Arguments>
Tier with_padding(Tier tier, const Arguments& given) {
  if (tier.name != kSimt)
    tier.reason += padding_of_width(given.q.size[3]) + padding_of_width(given.v.size[3]);
  return tier;
}

// Of operands as they are.
Tier tier_of(const AttentionForward& x, const Launch& launch) {
  const FoldProblem problem = attention_problem(x);
  Tier tier = fastest_tier(problem, {.sm80 = widest_sm80_forward(problem, false), .sm90 = 256}, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) {
      if (const auto packing = sm90::few_rows(problem)) {
        tier.scratch = sm90::few_rows_scratch(problem, *packing);
        tier.reason += message(
            "; few rows: tiles of ", packing->rows, " rows of ", packing->heads, " heads, ",
            packing->splits == 1 ? "columns not split" : message("columns in ", packing->splits, " splits"));
      } else if (!problem.range.all()) {
        tier.scratch = 2;  // a counter of 8 bytes
      }
    }
  }
  return tier;
}

Tier tier_of(const AttentionBackward& x, const Launch& launch) {
  const FoldProblem problem = attention_problem(x);
  Obstacles obstacles;
  if (!x.grad_out.present()) obstacles.both = "only the log-sum-exp has a gradient";
  if (problem.bias.present() && std::max(problem.width(), problem.payload_width()) > 128)
    obstacles.sm90 = "there is a bias of scores, and a width is more than 128";
  if (launch.deterministic && x.d_bias.present() && repeats(x.d_bias))
    obstacles.both = "scores share a bias whose gradient is wanted, and the deterministic mode is asked for";
  Tier tier = fastest_tier(problem, {.sm80 = widest_sm80_backward(problem), .sm90 = 256}, launch, obstacles);
  tier.adds_rows = tier.name != kSm90 || sm90::gradients_at_once(problem);
  JobSharing sharing;
  if (tier.name == kSm80) sharing = sm80::backward_sharing(problem, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sharing = sm90::backward_sharing(problem, launch);
  }
  if (sharing.in_parts > 0) tier.reason += message("; ", sharing.in_parts, " tiles of columns in parts");
  tier.scratch = tier.name == kSimt ? 2 * x.q.size[0] * x.q.size[1] * x.q.size[2]
                                    : BackwardScratch(x, nullptr, sharing).size;
  return tier;
}

}  // namespace

Tier attention_forward_tier(const AttentionForward& x, const Launch& launch) {
  return with_padding(tier_of(padded(x), launch), x);
}
Tier attention_backward_tier(const AttentionBackward& x, const Launch& launch) {
  return with_padding(tier_of(padded(x), launch), x);
}

void attention_forward(const AttentionForward& x, const Launch& launch) {
  const Tier tier = tier_of(x, launch);
  require_scratch(x.scratch, tier);
  if (tier.name == kSm80) sm80::attention_forward(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::attention_forward(x, launch);
  }
  if (tier.name != kSimt) return count_tier("attention_forward", tier, x.q.dtype);
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {}};
    fold_forward<true>(LogSumExp<T>{}, attention_problem(x), rows, x.out, launch);
  });
  count_simt("attention_forward", x.q.dtype);
}

void attention_backward(const AttentionBackward& x, const Launch& launch) {
  const Tier tier = tier_of(x, launch);
  const bool simt = tier.name == kSimt;
  require_scratch(x.scratch, tier);
  for (const TensorView* gradient : {&x.d_k, &x.d_v}) {
    const DType expected = simt ? accumulation(x.q.dtype) : x.q.dtype;
    require(!gradient->present() || gradient->dtype == expected, "dk, dv: expected ", name(expected),
            ", as attention_backward_tier says, got ", name(gradient->dtype));
  }
  const DType of_rows = tier.adds_rows ? accumulation(x.q.dtype) : x.q.dtype;
  require(!x.d_q.present() || x.d_q.dtype == of_rows, "dq: expected ", name(of_rows),
          ", as attention_backward_tier says, got ", name(x.d_q.dtype));
  if (tier.name == kSm80) sm80::attention_backward(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::attention_backward(x, launch);
  }
  if (!simt) return count_tier("attention_backward", tier, x.q.dtype, launch.deterministic);
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    T *of_lse = data<T>(x.scratch), *centre = of_lse + x.q.size[0] * x.q.size[1] * x.q.size[2];
    row_centre<T>(x.grad_out, x.out, x.grad_lse, of_lse, centre, launch);
    const LogSumExpRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), {centre, 1}, {of_lse, 1}};
    const FoldGradients wanted{
        .grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v, .d_bias = x.d_bias};
    fold_backward<true>(LogSumExp<T>{}, attention_problem(x), rows, wanted, launch);
  });
  count_simt("attention_backward", x.q.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
