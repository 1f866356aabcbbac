// What the MLP's CUDA files share: what keeps a call from tensor cores, and the kernels of an activation.
#pragma once

#include <algorithm>

#include "monoidreduce/error.h"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/ops/mlp.h"
#include "tier.h"

namespace monoidreduce::cuda {

// The call with operands that are padded, if they need to be.
template <class Arguments>
Arguments padded(const Arguments& given) {
  Arguments x = given;
  const auto pad = [](std::int64_t& size) { size = padded_size(size); };
  pad(x.x.size[1]), pad(x.w1.size[0]), pad(x.w1.size[1]), pad(x.w2.size[0]), pad(x.w2.size[1]);
  if (x.bias1.present()) pad(x.bias1.size[0]);
  return x;
}
template <class Arguments>
Tier with_padding(Tier tier, const Arguments& given) {
  const std::int64_t hidden = given.w1.size[0];
  if (tier.name == kSimt) return tier;
  tier.reason += padding_of_width(given.x.size[1]) + padding_of_width(given.w2.size[0]);
  if (hidden % 8 != 0)
    tier.reason += message("; of ", padded_size(hidden), " hidden units, padded from ", hidden);
  return tier;
}

// What keeps the call from tensor cores: the second weight lies with the hidden units adjacent, so their number is a
// width too.
template <class Arguments>
std::string mlp_obstacle(const Arguments& x) {
  const std::int64_t hidden = x.w1.size[0];
  return hidden % 8 == 0 ? "" : message("there are ", hidden, " hidden units, not a multiple of 8");
}

// In how many splits hidden units may come where rows are few. Their partial sums take at most 32 MiB, and each of the warps
// that combine a row waits for every fourth split, one after another.
inline std::int64_t most_splits(const FoldProblem& p) {
  constexpr std::int64_t kMost = 128, kFloats = (32 << 20) / sizeof(float);
  return std::min(kMost, kFloats / (p.rows() * p.payload_width()));
}

// The tier of a call that no kernel takes whole: hidden values are held in parts, within the bytes of the workspace, or the
// SIMT kernels take it. fused: the tier of the kernels that store none.
//
// A part of the forward pass has some rows and all hidden units: each result is one product. A part of the backward pass has
// all rows, and the rows' gradient is summed over parts, or all hidden units, and the weights' gradients are: whichever
// is smaller.
Tier mlp_forward_parts(const Tier& fused, const FoldProblem& p, std::int64_t workspace, const Launch& launch);
Tier mlp_backward_parts(const Tier& fused, const FoldProblem& p, std::int64_t workspace,
                        const Launch& launch);

// Calls run(monoid) with the type of the monoid that a kernel is for. Four activations, those of most models, have kernels of
// their own where one for all is slower for most of them: a warp does not start on what follows the branch to an activation before it is through.
// (H100, 16384 rows and units, width 128, Hopper's backward pass in bfloat16: gelu_tanh 0.58 ms, named 0.62, gelu 0.87 and 0.90;
// in float16 0.63 and 0.75. sm_80's forward pass, 8192 units, width 64: 0.151 and 0.174; 4096, in float, 0.153 and 0.201.) All
// others share one, since a kernel takes a compiler most of a second.
template <class M, class Run>
void with_own_kernel(const M& m, Run run) {
  run(m);
}
template <class R, class Run>
void with_own_kernel(const NamedSum<R>& named, Run run) {
  using enum ActivationKind;
  switch (named.kind) {
    case kRelu:
      return run(Sum<R, Relu>{});
    case kGelu:
      return run(Sum<R, Gelu>{});
    case kGeluTanh:
      return run(Sum<R, GeluTanh>{});
    case kSilu:
      return run(Sum<R, Silu>{});
    default:
      return run(named);
  }
}

}  // namespace monoidreduce::cuda
