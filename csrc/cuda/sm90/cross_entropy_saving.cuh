// The forward passes of cross entropy and logsumexp_matmul on Hopper that save dlogits for their backward passes.
#pragma once

#include "../cross_entropy_passes.cuh"
#include "monoidreduce/launch/saving_epilogue_sm90.cuh"
#include "monoidreduce/launch/weights_to_gradients.cuh"
#include "monoidreduce/ops/cross_entropy.h"
#include "monoidreduce/ops/logsumexp.h"

namespace monoidreduce::cuda {

using namespace monoidreduce::sm90;

// dlogits of a row from its saved weights. The target has a term of its own: miss, its p less 1, has digits
// that p near 1 lacks.
struct CrossEntropyTerms {
  CrossEntropyRows<float> rows;
  const float* miss;
  float kept_upstream;
  __device__ bool active(std::int64_t row) const { return rows.active(row); }
  __device__ RowTerms<1> terms(std::int64_t row) const {
    const auto u = rows.upstream(row, kept_upstream);
    return {.lse = {bits(rows.product(row).lse)},
            .factor = {u.lse},
            .addend = u.sum,
            .at_label = u.lse * miss[row] + (u.lse + u.target + u.sum),
            .label = rows.target.valid(row) ? static_cast<int>(rows.label(row)) : -1};
  }
};

// `miss` lies behind the frames: [rows].
template <class Kept>
float* miss_of(const Kept& kept, const FoldProblem& p) {
  return kept.frames[0] + p.rows() * kept.tiles();
}

template <class E, class Call, class Kept>
void to_gradients(const Call& x, const Kept& kept, const FoldProblem& p, const Launch& launch) {
  const CrossEntropyTerms terms{cross_entropy_rows<float>(x), miss_of(kept, p),
                                static_cast<float>(x.kept_upstream)};
  weights_to_gradients<E>(kept, terms, p, launch);
}

// cross_entropy_forward_pass that also saves dlogits for an upstream gradient of kept_upstream, or the weights
// that they are made of.
template <class Tile>
void cross_entropy_forward_saving(const CrossEntropyForward& x, const Plan& plan, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const auto kept = kept_weights<Tile>(x.kept, static_cast<float*>(x.scratch.data) + plan.saved.frames);
  const CrossEntropyResults results{cross_entropy_rows<float, double>(x), miss_of(kept, problem)};
  const ScaledScores<Bits> scores(problem.score, kLog2E);
  with_element_of<Tile>(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    const auto fold = [&](const auto& m) {
      in_gathered_parts(x, problem, launch, [&](const FoldProblem& part) {
        fold_and_save<E, Tile>(m, scores, part, results, x.scratch.data, kept.from(part.first_place), launch);
      });
    };
    if (x.options.label_smoothing != 0) {
      fold(CrossEntropy<Bits>{});
    } else {
      fold(HardCrossEntropy<Bits>{});
    }
    if (x.kept_upstream != 0) to_gradients<E>(x, kept, problem, launch);
  });
}

// dlogits of a row of logsumexp_matmul, which has no target.
struct LogSumExpTerms {
  LogSumExpRows<float> rows;
  float kept_upstream;
  __device__ bool active(std::int64_t) const { return true; }
  __device__ RowTerms<1> terms(std::int64_t row) const {
    return {.lse = {bits(rows.product(row))}, .factor = {kept_upstream}};
  }
};

// logsumexp_forward_pass that also saves dlogits for an upstream gradient of kept_upstream.
template <class Tile>
void logsumexp_forward_saving(const LogSumExpForward& x, const Plan& plan, const Launch& launch) {
  const FoldProblem problem = logsumexp_problem(x);
  const auto kept = kept_weights<Tile>(x.kept, static_cast<float*>(x.scratch.data) + plan.saved.frames);
  const LogSumExpRows<float> rows{static_cast<float*>(x.lse.data), static_cast<float*>(x.lse_low.data), {}};
  const ScaledScores<Bits> scores(problem.score, kLog2E);
  with_element_of<Tile>(x.a.dtype, [&](auto element) {
    using E = decltype(element);
    fold_and_save<E, Tile>(LogSumExp<Bits>{}, scores, problem, LogSumExpResults{rows}, x.scratch.data, kept,
                           launch);
    weights_to_gradients<E>(kept, LogSumExpTerms{rows, static_cast<float>(x.kept_upstream)}, problem, launch);
  });
}

}  // namespace monoidreduce::cuda
