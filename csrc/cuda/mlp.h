// What the MLP's CUDA files share: what keeps a call from tensor cores.
#pragma once

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

}  // namespace monoidreduce::cuda
