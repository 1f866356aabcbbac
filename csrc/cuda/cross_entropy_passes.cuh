// What the tensor-core tiers share for linear cross entropy and logsumexp_matmul: the fold, and the local
// gradients (dlogits), by contraction tiles.
#pragma once

#include "element.h"
#include "gathered_rows.h"
#include "logit_scores.cuh"
#include "monoidreduce/launch/fold_epilogue.cuh"
#include "monoidreduce/launch/gradient_epilogue.cuh"
#include "monoidreduce/ops/cross_entropy.h"
#include "monoidreduce/ops/logsumexp.h"
#include "monoidreduce/rows.h"
#include "natural.cuh"

namespace monoidreduce::cuda {

__device__ __forceinline__ double in_double(Bits sum) { return double{sum.x}; }
__device__ __forceinline__ Index<double> in_double(Index<Bits> count) { return count; }

// The row policy of the forward fold (StateRows). Losses are computed in double from the state in base 2.
struct CrossEntropyResults {
  CrossEntropyRows<float, double> rows;
  // [rows], p of the target less 1 (p itself, near 1, would not have these digits); or null.
  float* miss;
  __device__ std::int64_t label(std::int64_t row) const { return rows.label(row); }
  template <class Count>
  __device__ void store(std::int64_t row, const ClassState<Bits, Count>& s) const {
    using Number = decltype(in_double(s.count));
    const ClassState<double, Number> in_natural_units{natural(s.lse), natural(s.target), natural(s.sum),
                                                      in_double(s.count)};
    const ClassStatistics<double> p = class_statistics(in_natural_units);
    rows.store(row, p);
    if (miss != nullptr) miss[row] = static_cast<float>(::expm1((p.target - p.lse.high) - p.lse.low));
  }
  __device__ void skip(std::int64_t row) const {
    rows.skip(row);
    if (miss != nullptr) miss[row] = 0.f;
  }
};
struct LogSumExpResults {
  LogSumExpRows<float> rows;
  __device__ std::int64_t label(std::int64_t row) const { return rows.label(row); }
  __device__ void store(std::int64_t row, LogSumExp<Bits>::State s) const {
    rows.store(row, rounded<float>(LogSumExp<double>{}.project(natural(s))));
  }
  __device__ void skip(std::int64_t) const {}  // all rows are active
};

// kMayReadColumns: the tile has enough registers for monoids that read columns (class weights).
template <class Tile, bool kMayReadColumns>
void cross_entropy_forward_pass(const CrossEntropyForward& x, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const CrossEntropyResults results{cross_entropy_rows<float, double>(x), nullptr};
  with_element_of<Tile>(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    const auto run = [&](auto m, const auto& scores) {
      in_gathered_parts(x, problem, launch, [&](const FoldProblem& part) {
        fold_contraction<E, Tile>(m, scores, part, results, x.scratch.data, launch);
      });
    };
    if (needs_general_scores(x)) {
      const auto scores = logit_scores<E>(problem, x.bias);
      if constexpr (kMayReadColumns)
        return with_cross_entropy<Bits>(x, [&](const auto& m) { run(m, scores); });
      else
        return run(CrossEntropy<Bits>{}, scores);
    }
    const ScaledScores<Bits> scores(problem.score, kLog2E);
    if (x.options.label_smoothing != 0) return run(CrossEntropy<Bits>{}, scores);
    run(HardCrossEntropy<Bits>{}, scores);
  });
}

template <class Tile>
void logsumexp_forward_pass(const LogSumExpForward& x, const Launch& launch) {
  const FoldProblem problem = logsumexp_problem(x);
  const LogSumExpResults results{{static_cast<float*>(x.lse.data), static_cast<float*>(x.lse_low.data), {}}};
  with_element_of<Tile>(x.a.dtype, [&](auto element) {
    fold_contraction<decltype(element), Tile>(LogSumExp<Bits>{}, ScaledScores<Bits>(problem.score, kLog2E),
                                              problem, results, x.scratch.data, launch);
  });
}

// The row policy of the local gradients (LocalGradientRows).
struct CrossEntropyGradientRows {
  CrossEntropyRows<float> rows;
  using Upstream = CrossEntropy<Bits>::Upstream;

  __device__ int label(std::int64_t row) const { return static_cast<int>(rows.label(row)); }
  // A row that is not active has weights of 0, whatever its log-sum-exp.
  __device__ CrossEntropy<Bits>::Output product(std::int64_t row) const {
    const LogNumber<Bits> lse =
        rows.active(row) ? bits(rows.product(row).lse) : LogNumber<Bits>{infinity<Bits>(), 0.f};
    return {lse, 0.f, {0.f, 0.f}, 0};
  }
  __device__ bool far(const CrossEntropy<Bits>::Output& p) const { return is_large(p.lse); }
  __device__ Upstream upstream(std::int64_t row, Bits unit) const {
    if (!rows.active(row)) return {0.f, 0.f, 0.f};
    const auto u = rows.upstream(row);
    return {Bits(u.lse) * unit, Bits(u.target) * unit, Bits(u.sum) * unit};
  }
};

struct LogSumExpGradientRows {
  LogSumExpRows<float> rows;
  __device__ int label(std::int64_t) const { return -1; }
  __device__ LogNumber<Bits> product(std::int64_t row) const { return bits(rows.product(row)); }
  __device__ bool far(LogNumber<Bits> lse) const { return is_large(lse); }
  __device__ Bits upstream(std::int64_t row, Bits unit) const { return Bits(rows.upstream(row)) * unit; }
};

template <class Tile>
void cross_entropy_gradient_pass(const CrossEntropyLocalGradient& x, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const CrossEntropyGradientRows rows{cross_entropy_rows<float>(x)};
  with_element_of<Tile>(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    const auto run = [&](const auto& m, const auto& scores) {
      const auto epilogue = gradient_epilogue<E, Tile>(m, scores, problem, rows, {as_rows(x.out)}, x.sums);
      contraction<E>(Tile{}, problem, epilogue, nullptr, "local_gradient", launch);
    };
    if (needs_general_scores(x)) {
      const auto scores = logit_scores<E>(problem, x.bias);
      return with_cross_entropy<Bits>(x, [&](const auto& m) { run(m, scores); });
    }
    run(CrossEntropy<Bits>{}, ScaledScores<Bits>(problem.score, kLog2E));
  });
}

template <class Tile>
void logsumexp_gradient_pass(const LogSumExpLocalGradient& x, const Launch& launch) {
  const FoldProblem problem = logsumexp_problem(x);
  const LogSumExpGradientRows rows{{static_cast<float*>(x.lse.data),
                                    static_cast<float*>(x.lse_low.data),
                                    {static_cast<float*>(x.grad_lse.data), x.grad_lse.stride[0]}}};
  with_element_of<Tile>(x.a.dtype, [&](auto element) {
    using E = decltype(element);
    const ScaledScores<Bits> scores(problem.score, kLog2E);
    const auto epilogue =
        gradient_epilogue<E, Tile>(LogSumExp<Bits>{}, scores, problem, rows, {as_rows(x.out)}, {});
    contraction<E>(Tile{}, problem, epilogue, nullptr, "local_gradient", launch);
  });
}

}  // namespace monoidreduce::cuda
