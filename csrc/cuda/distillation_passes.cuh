// What the tensor-core tiers share of linear distillation: the fold, and the local gradients, by contraction tiles.
#pragma once

#include "element.h"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/fold_epilogue.cuh"
#include "monoidreduce/kernel/gradient_epilogue.cuh"
#include "monoidreduce/problems.h"
#include "monoidreduce/rows.h"
#include "natural.cuh"

namespace monoidreduce::cuda {

struct DistillationResults {
  DistillationRows<float> rows;
  NamedDistillation<double> monoid;
  using State = DistillationState<Bits>;
  __device__ std::int64_t label(std::int64_t) const { return -1; }
  // In double: a loss is a difference of logarithms of masses, and Bits rounds each of them.
  __device__ void store(std::int64_t row, const State& s) const {
    const auto p = monoid.project({natural(s.p), {natural(s.q.softmax), natural(s.q.sum)}});
    rows.store(row, {rounded<float>(p.p_lse), rounded<float>(p.q_lse), rounded<float>(p.centre),
                     static_cast<float>(p.loss)});
  }
  __device__ void skip(std::int64_t row) const {
    rows.loss[row] = 0.f;
    for (int n = 0; n < 6; ++n) rows.stats[n * rows.rows + row] = 0.f;
  }
};

inline DistillationRows<float> rows_of(const DistillationForward& x) {
  return {.mask = static_cast<const bool*>(x.mask.data),
          .mask_stride = x.mask.stride[0],
          .rows = x.x.size[0],
          .loss = static_cast<float*>(x.loss.data),
          .stats = static_cast<float*>(x.stats.data),
          .grad_loss = {static_cast<float*>(x.kept_upstream.data), 0}};
}

// run(E{}, monoid, scores, results) folds.
template <class Run>
void distillation_forward_pass(const DistillationForward& x, Run run) {
  const ScaledScores<Bits> scores(distillation_problem(x).score, kLog2E);
  with_element(x.x.dtype, [&](auto element) {
    const NamedDistillation<Bits> monoid{{}, x.options.loss};
    run(element, monoid, scores, DistillationResults{rows_of(x), {{}, x.options.loss}});
  });
}

template <class R>
struct DistillationGradientRows {
  DistillationRows<float> rows;
  using Output = DistillationOutput<R>;

  __device__ int label(std::int64_t) const { return -1; }
  // Without a part in the loss a row weighs nothing, whatever its statistics. Measured from a number: of infinities the
  // difference that a gradient is made of would be NaN.
  __device__ Output product(std::int64_t row) const {
    constexpr LogNumber<R> kNothing{kLargest<float>, 0.f};
    if (!rows.active(row)) return {kNothing, kNothing, kNothing, 0.f};
    const auto p = rows.product(row);
    const auto in_r = [](LogNumber<float> x) { return LogNumber<R>{x.high, x.low}; };
    // Gradients of 16 bits show nothing of the centre's low word, which would take registers.
    return {in_r(p.p_lse), in_r(p.q_lse), {p.centre.high, 0.f}, 0.f};
  }
  __device__ bool far(const Output& p) const { return is_far(p.p_lse) || is_far(p.q_lse); }
  __device__ R upstream(std::int64_t row, R unit) const {
    return rows.active(row) ? rows.upstream(row) * unit : R(0);
  }
};

// In natural units: the loss makes some of the gradients numbers with a unit, and others not.
template <class Tile>
void distillation_gradient_pass(const DistillationLocalGradient& x, const Launch& launch) {
  const FoldProblem problem = distillation_problem(x);
  with_element(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    using R = Fast<E>;
    const DistillationGradientRows<R> rows{
        {.mask = static_cast<const bool*>(x.mask.data),
         .mask_stride = x.mask.stride[0],
         .rows = x.x.size[0],
         .loss = nullptr,
         .stats = static_cast<float*>(x.stats.data),
         .grad_loss = {static_cast<float*>(x.grad_loss.data), x.grad_loss.stride[0]}}};
    const ScaledScores<R> scores(problem.score, 1.);
    // A kernel for each loss: with one for all, Hopper's step of the reverse KL took 5 % longer.
    NamedDistillation<R>{{}, x.options.loss}.with_named([&](const auto& m) {
      if (x.teacher_out.present()) {
        local_gradient<E, Tile>(m, scores, problem, rows, {as_rows(x.out), as_rows(x.teacher_out)}, {},
                                launch);
      } else {
        local_gradient<E, Tile>(m, scores, problem, rows, {as_rows(x.out)}, {}, launch);
      }
    });
  });
}

}  // namespace monoidreduce::cuda
