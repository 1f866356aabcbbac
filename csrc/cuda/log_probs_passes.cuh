// What the tensor-core tiers share for log-probabilities: the fold, and the local gradients (dlogits), by
// contraction tiles.
#pragma once

#include "element.h"
#include "gathered_rows.h"
#include "logit_scores.cuh"
#include "monoidreduce/device/block/kept_scores.cuh"
#include "monoidreduce/launch/fold_epilogue.cuh"
#include "monoidreduce/launch/gradient_epilogue.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/ops/log_probs.h"
#include "natural.cuh"

namespace monoidreduce::cuda {

// The row policy of the forward fold (StateRows).
struct LogProbsResults {
  LogProbsRows<float, double> rows;
  __device__ std::int64_t label(std::int64_t row) const { return rows.label(row); }
  __device__ float factor(std::int64_t row) const { return rows.factor(row); }
  __device__ void store(std::int64_t row, const LogProbs<Bits>::State& s, int top = -1) const {
    auto p = LogProbs<double>{}.project({natural(s.softmax), natural(s.sum), natural(s.target)});
    p.top = top;
    rows.store(row, p);
  }
  __device__ void store(std::int64_t row, const TopLogProbs<Bits>::State& s) const {
    store(row, s.all, TopLogProbs<Bits>{}.top(s));
  }
  __device__ void skip(std::int64_t row) const { rows.skip(row); }
};

// The scores of the classes that the rows of a problem keep.
template <class Scores, class Call>
KeptScores<Bits, Scores> kept_scores(const Scores& scores, const Call& x, const FoldProblem& p) {
  const KeptClasses kept = kept_classes(x);
  return {scores, kept.words, kept.words_of_row, kept.first_class, row_order(p)};
}

// kTopOfLogits: the tile has enough registers for the index of the largest logit where logits have a bias or
// a softcap. kKept: for kept classes.
template <class Tile, bool kTopOfLogits, bool kKept>
void log_probs_forward_pass(const LogProbsForward& x, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const LogProbsResults results{log_probs_rows<float, double>(x)};
  with_element_of<Tile>(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    // scores_of: makes the scores of a part of the rows.
    const auto run = [&](const auto& m, const auto& scores_of) {
      in_gathered_parts(x, problem, launch, [&](const FoldProblem& part) {
        fold_contraction<E, Tile>(m, scores_of(part), part, results, x.scratch.data, launch);
      });
    };
    const auto run_logits = [&](const auto& scores_of) {
      if constexpr (kTopOfLogits)
        with_log_probs<Bits>(x, [&](const auto& m) { run(m, scores_of); });
      else
        run(LogProbs<Bits>{}, scores_of);
    };
    const auto logits = logit_scores<E>(problem, x.bias);
    const ScaledScores<Bits> scores(problem.score, kLog2E);
    if constexpr (kKept) {
      if (x.mask.present()) {
        if (has_bias_or_softcap(x))
          return run(LogProbs<Bits>{}, [&](const FoldProblem& part) { return kept_scores(logits, x, part); });
        return with_log_probs<Bits>(x, [&](const auto& m) {
          run(m, [&](const FoldProblem& part) { return kept_scores(scores, x, part); });
        });
      }
    }
    if (has_bias_or_softcap(x)) return run_logits([&](const FoldProblem&) { return logits; });
    with_log_probs<Bits>(x, [&](const auto& m) { run(m, [&](const FoldProblem&) { return scores; }); });
  });
}

// The row policy of the local gradients (LocalGradientRows).
struct LogProbsGradientRows {
  LogProbsRows<float> rows;

  __device__ int label(std::int64_t row) const { return static_cast<int>(rows.label(row)); }
  __device__ float factor(std::int64_t row) const { return rows.active(row) ? rows.factor(row) : 1.f; }
  // A row that is not active has weights of 0, whatever its log-sum-exp. The entropy is part of upstream,
  // which saves a register.
  __device__ LogProbsStatistics<Bits> product(std::int64_t row) const {
    const LogNumber<Bits> lse =
        rows.active(row) ? bits(rows.product(row).lse) : LogNumber<Bits>{infinity<Bits>(), 0.f};
    return {lse, 0.f, 0.f, -1};
  }
  __device__ bool far(const LogProbsStatistics<Bits>& p) const { return is_large(p.lse); }
  __device__ LogProbsUpstream<Bits> upstream(std::int64_t row, Bits unit) const {
    if (!rows.active(row)) return {0.f, 0.f, 0.f};
    const auto u = rows.upstream(row);
    return {Bits(u.lse - u.entropy * rows.product(row).entropy) * unit, Bits(u.target) * unit,
            Bits(u.entropy) * unit};
  }
};

template <class Tile>
void log_probs_gradient_pass(const LogProbsLocalGradient& x, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const LogProbsGradientRows rows{log_probs_rows<float>(x)};
  with_element_of<Tile>(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    const auto run = [&](const auto& scores) {
      const auto epilogue =
          gradient_epilogue<E, Tile>(LogProbs<Bits>{}, scores, problem, rows, {as_rows(x.out)}, x.sums);
      contraction<E>(Tile{}, problem, epilogue, nullptr, "local_gradient", launch);
    };
    const auto logits = logit_scores<E>(problem, x.bias);
    const ScaledScores<Bits> scores(problem.score, kLog2E);
    if (x.mask.present()) return run(kept_scores(scores, x, problem));  // there is neither (obstacle)
    has_bias_or_softcap(x) ? run(logits) : run(scores);
  });
}

}  // namespace monoidreduce::cuda
