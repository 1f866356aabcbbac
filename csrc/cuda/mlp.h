// What the MLP's CUDA files share: the activation as a type, and when Hopper's kernels apply.
#pragma once

#include "monoidreduce/activation.h"
#include "monoidreduce/error.h"
#include "monoidreduce/problems.h"
#include "tier.h"

namespace monoidreduce::cuda {

// The second weight lies with the hidden units adjacent, so their number is a width too.
template <class Arguments>
std::string mlp_obstacle(const Arguments& x, std::int64_t widest) {
  const std::int64_t hidden = x.w1.size[0];
  if (hidden % 8 != 0) return message("there are ", hidden, " hidden units, not a multiple of 8");
  return sm90_obstacle(mlp_problem(x), widest);
}

// Calls run(Activation{}) with the activation that kind names.
template <class Run>
void with_activation(ActivationKind kind, Run run) {
  using enum ActivationKind;
  switch (kind) {
    case kRelu:
      return run(Relu{});
    case kRelu2:
      return run(Relu2{});
    case kGelu:
      return run(Gelu{});
    case kGeluTanh:
      return run(GeluTanh{});
    case kSilu:
      return run(Silu{});
    case kTanh:
      return run(Tanh{});
    case kSigmoid:
      return run(Sigmoid{});
    case kIdentity:
      return run(Identity{});
  }
}

}  // namespace monoidreduce::cuda
