// What the tensor-core tiers share for attention with functions of its scores: the backward pass around a
// tier's kernel.
#pragma once

#include "attention_passes.cuh"
#include "modified_scores.cuh"
#include "monoidreduce/ops/modified_attention.h"

namespace monoidreduce::cuda {

// run(E{}, problem, wanted, scratch) must launch a tier's backward fold. It is called after the preprocess of
// the rows.
template <class Run>
void modified_backward_passes(const ModifiedAttentionBackward& x, const Plan& plan, const Launch& launch,
                              Run run) {
  const FoldProblem p = modified_problem(x);
  const BackwardScratch scratch(x, plan);
  const float scale = static_cast<float>(x.options.scale);
  const FoldGradients wanted{.grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v};
  const DeviceGuard device(x.q.cuda_device);
  Halves::with(x.q.dtype, [&](auto element) {
    prepare_rows<decltype(element)>({x.grad_out, x.out, x.out_low, x.lse, x.grad_lse, scale},
                                    scratch.residuals, scratch.cleared, launch);
    run(element, p, wanted, scratch);
  });
  sink_gradient(LogSumExp<float>{}, known_rows(x, scratch), x, launch);
}

}  // namespace monoidreduce::cuda
