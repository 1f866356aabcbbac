#include "modified_scores.cuh"
#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/launch/row_prologue.cuh"
#include "monoidreduce/launch/sink_gradient.cuh"
#include "monoidreduce/ops/modified_attention.h"

namespace monoidreduce::cuda::simt {

using namespace monoidreduce::simt;

template <>
void run(const ModifiedAttentionForward& x, const Plan&, const Launch& launch) {
  const FoldProblem p = modified_problem(x);
  const std::int64_t jobs = forward_jobs(p);
  if (jobs == 0) return;
  const DeviceGuard device(x.q.cuda_device);
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const SoftmaxRows<T> rows{
        .lse = data<T>(x.lse), .lse_low = data<T>(x.lse_low), .sinks = data<const T>(x.sinks)};
    launch_loaded("modified_attention_forward", kernel_of(x), blocks_for(jobs), kThreads,
                  sizeof(TileMemory<T>), launch.stream, LogSumExp<T>{},
                  forward_arguments(p, {x.out, x.out_low}), program_scores<T>(x), rows);
  });
}

template <>
void run(const ModifiedAttentionBackward& x, const Plan&, const Launch& launch) {
  const FoldProblem p = modified_problem(x);
  const FoldGradients wanted{.grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v};
  const DeviceGuard device(x.q.cuda_device);
  with_accumulation(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    T *of_lse = data<T>(x.scratch), *centre = of_lse + p.batch() * p.heads() * p.rows();
    if (!x.options.weights)  // attend has weights, and no centre
      row_centre<T>(x.grad_out, x.out, x.out_low, x.grad_lse, of_lse, centre, launch);
    const SoftmaxRows<T> rows{data<T>(x.lse), data<T>(x.lse_low), centre, of_lse};
    sink_gradient(LogSumExp<T>{}, rows, x, launch);
    const auto run = [&](const PullArguments& arguments, const Walk& walk, unsigned blocks) {
      launch_loaded("modified_attention_backward", kernel_of(x), blocks, kThreads, sizeof(TileMemory<T>),
                    launch.stream, LogSumExp<T>{}, arguments, program_scores<T>(x), rows, walk);
    };
    backward_launches<true, LogSumExp<T>::kScores>(p, wanted, launch.deterministic, run);
  });
}

}  // namespace monoidreduce::cuda::simt
