// What the tensor-core tiers share for attention: the passes before and after a tier's kernel, and what they
// store and read for each row.
#pragma once

#include "../plan/attention.h"
#include "../plan/tiles.h"
#include "element.h"
#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/device/resident/attention_rows.cuh"
#include "monoidreduce/device/schedule/semaphores.cuh"
#include "monoidreduce/launch/repair.cuh"
#include "monoidreduce/launch/row_residuals.cuh"
#include "monoidreduce/launch/sink_gradient.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/ops/attention.h"
#include "operator.h"

namespace monoidreduce::cuda {

// How a tier reads score biases: element by element from global memory, or in tiles by TMA.
enum class Biases { kElements, kTiles };

// Calls run(scores) with the score policy that the problem needs.
template <Biases kBiases, class E, class Run>
void with_attention_scores(const FoldProblem& p, const TensorView& d_bias, Run run) {
  const auto tiles = [&](auto element) {
    run(TileBiasedScores<Bits, decltype(element)>(p.score, kLog2E, rows_share(p.bias), !repeats(d_bias),
                                                  device_tensor(d_bias)));
  };
  if (p.bias.present()) {
    if constexpr (kBiases == Biases::kElements)
      return run(ElementBiasedScores<Bits>(p.score, kLog2E, device_tensor(p.bias), device_tensor(d_bias)));
    else if (p.bias.dtype == DType::kBool)
      return tiles(false);
    else if (p.bias.dtype == DType::kFloat32)
      return tiles(0.f);
    else
      return tiles(E{});
  }
  if (p.score.softcap == 0) return run(ScaledScores<Bits>(p.score, kLog2E));
  run(SoftcappedScores<Bits>(p.score, kLog2E));
}

// Where a call stores the log-sum-exps of its rows, and the sinks that they read.
template <class Call>
AttentionRows attention_rows(const Call& x) {
  return {data<float>(x.lse), data<float>(x.lse_low), data<const float>(x.sinks)};
}

// Calls run(E{}, scores, rows), which must launch a tier's forward fold.
template <Biases kBiases, class Elements = Halves, class Run>
void with_attention_rows(const AttentionForward& x, const FoldProblem& problem, Run run) {
  const AttentionRows rows = attention_rows(x);
  Elements::with(x.q.dtype, [&](auto element) {
    with_attention_scores<kBiases, decltype(element)>(
        problem, {}, [&](const auto& scores) { run(element, scores, rows); });
  });
}

// Recomputes the rows whose log-sum-exp is NaN.
inline void recompute_marked(const AttentionForward& x, const FoldProblem& problem, const Launch& launch) {
  const RepairedAttentionRows rows{data<float>(x.lse), data<float>(x.lse_low), data<const float>(x.sinks)};
  repair_forward(LogSumExp<double>{}, problem, rows, {x.out, x.out_low}, launch);
}
// Recomputes the rows that a masked element may have spoiled: those that are not finite.
inline void repair_attention(const AttentionForward& x, const FoldProblem& problem, const Launch& launch) {
  if (may_mask(problem)) recompute_marked(x, problem, launch);
}

// The scratch memory of the backward pass.
struct BackwardScratch {
  RowResiduals residuals;
  RowMarks marks;
  RowSemaphores turns{};  // deterministic mode only
  float* sharing;
  Cleared cleared;  // the marks, the words of sharing and turns, and d_q if kernels add to it

  template <class Call>
  BackwardScratch(const Call& x, const Plan& plan) {
    const JobSharing& how = plan.sharing;
    const BackwardParts parts(x, how);
    static_assert(RowMarks::kUnit == parts.kMarked && RowSemaphores::kRows == parts.kInTurn);
    static_assert(Band::kFar == tiles::kFar);
    float *part[parts.kCount], *at = data<float>(x.scratch);
    for (int n = 0; n < parts.kCount; ++n) part[n] = at, at += (parts.floats[n] + 3) / 4 * 4;
    residuals = {part[0], part[1], static_cast<int>(parts.padded_rows)};
    marks = {part[2], part[3], static_cast<int>(parts.row_units), static_cast<int>(parts.column_units)};
    sharing = part[4];
    if (how.in_turn) turns = {part[5], parts.padded_rows};
    float* const first = sharing + how.floats - how.words;  // the words are last; the turns follow them
    cleared = {.marks = marks,
               .column_marks = parts.floats[3],
               .words = reinterpret_cast<unsigned*>(first),
               .word_count = part[5] + parts.floats[5] - first,
               .d_a = plan.adds_rows ? data<float>(x.d_q) : nullptr,
               .d_a_width = static_cast<int>(x.q.size[3])};
  }
};

// What is known of a row when its gradients are computed again, and for the gradient of its sink.
struct KnownRows {
  const float *lse, *lse_low;  // [rows]
  RowResiduals residuals;
  std::int64_t rows;  // of each head
  float inverse_scale;
  __device__ LogNumber<float> product(std::int64_t row) const {
    return {softmax_product(lse[row], upstream(row)), lse_low[row]};
  }
  __device__ float upstream(std::int64_t row) const {
    return residuals.upstream[row / rows * residuals.padded_rows + row % rows] * inverse_scale;
  }
};

template <class Call>
KnownRows known_rows(const Call& x, const BackwardScratch& scratch) {
  return {data<float>(x.lse), data<float>(x.lse_low), scratch.residuals, x.q.size[2],
          1 / static_cast<float>(x.options.scale)};
}

// Runs the whole backward pass. run(E{}, scores, problem, wanted, scratch) must launch a tier's backward
// fold.
template <Biases kBiases, class Elements = Halves, class Run>
void attention_backward_passes(const AttentionBackward& x, const Plan& plan, const Launch& launch, Run run) {
  const FoldProblem problem = attention_problem(x);
  const BackwardScratch scratch(x, plan);
  const float scale = static_cast<float>(x.options.scale);
  const FoldGradients wanted{.grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v};
  Elements::with(x.q.dtype, [&](auto element) {
    prepare_rows<decltype(element)>({x.grad_out, x.out, x.out_low, x.lse, x.grad_lse, scale},
                                    scratch.residuals, scratch.cleared, launch);
    with_attention_scores<kBiases, decltype(element)>(
        problem, x.d_bias, [&](const auto& scores) { run(element, scores, problem, wanted, scratch); });
  });
  const KnownRows rows = known_rows(x, scratch);
  sink_gradient(LogSumExp<float>{}, rows, x, launch);
  if (may_mask(problem)) repair_backward(LogSumExp<float>{}, problem, rows, wanted, scratch.marks, launch);
}

}  // namespace monoidreduce::cuda
