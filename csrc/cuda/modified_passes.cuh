// What the tensor-core tiers share of attention whose scores functions modify: launches of kernels that were compiled for the
// functions.
#pragma once

#include "attention_passes.cuh"
#include "engine.h"
#include "monoidreduce/device/program/score_element.h"
#include "monoidreduce/launch/loaded_kernels.cuh"

namespace monoidreduce::cuda {

// ModifiedScores of any program.
template <class Call>
ModifiedScoresData scores_of(const Call& x) {
  const auto count = [](const TensorView& t) { return t.present() ? t.size[0] : std::int64_t{0}; };
  ModifiedScoresData scores{
      .tables = {x.table.data, data<std::int64_t>(x.table_index), count(x.table), count(x.table_index)},
      .blocks = data<std::int64_t>(x.blocks),
      .block_stride = {x.blocks.stride[0], x.blocks.stride[1], x.blocks.stride[2], x.blocks.stride[3]},
      .block_rows = static_cast<int>(x.options.block_rows),
      .block_columns = static_cast<int>(x.options.block_columns),
      .rows = static_cast<int>(x.q.size[2]),
      .columns = static_cast<int>(x.k.size[2]),
      .scale = static_cast<float>(x.options.scale),
      .size = {}};
  require(x.sizes.size() <= ModifiedScoresData::kMostSizes, "sizes: expected at most ",
          ModifiedScoresData::kMostSizes, ", got ", x.sizes.size());
  std::copy(x.sizes.begin(), x.sizes.end(), scores.size);
  return scores;
}

// run(E{}, problem, wanted, scratch) launches a tier's backward fold, after the pass over the rows.
template <class Run>
void modified_backward_passes(const ModifiedAttentionPull& x, const JobSharing& sharing, const Launch& launch,
                              Run run) {
  const FoldProblem p = modified_problem(x);
  const BackwardScratch scratch(x, sharing);
  const float scale = static_cast<float>(x.options.scale);
  const FoldGradients wanted{.grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v};
  const DeviceGuard device(x.q.cuda_device);
  Halves::with(x.q.dtype, [&](auto element) {
    prepare_rows<decltype(element)>(
        {x.grad_out, x.out, x.out_low, x.lse, x.grad_lse, scale, x.k.size[1], is_partial(p)},
        scratch.residuals, scratch.marks, scratch.cleared, launch);
    run(element, p, wanted, scratch);
  });
  sink_gradient(LogSumExp<float>{}, known_rows(x, scratch), x, launch);
}

}  // namespace monoidreduce::cuda
