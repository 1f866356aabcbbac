// What the MLP's CUDA files share: the activation as a type, and what keeps a call from tensor cores.
#pragma once

#include "monoidreduce/activation.h"
#include "monoidreduce/error.h"
#include "monoidreduce/problems.h"
#include "tier.h"

namespace monoidreduce::cuda {

// What keeps the call from tensor cores: the second weight lies with the hidden units adjacent, so their number is a
// width too.
template <class Arguments>
std::string mlp_obstacle(const Arguments& x) {
  const std::int64_t hidden = x.w1.size[0];
  return hidden % 8 == 0 ? "" : message("there are ", hidden, " hidden units, not a multiple of 8");
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
