#include "../element.h"
#include "linear_losses.h"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/weights_to_gradients.cuh"
#include "monoidreduce/problems.h"
#include "monoidreduce/rows.h"
#include "natural.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Tile = ContractionTile<256, 4>;

struct CrossEntropyResults {
  CrossEntropyRows<float, double> rows;
  float* miss;  // [rows], the target's share less 1, which digits of a share near 1 would not tell; or null
  __device__ std::int64_t label(std::int64_t row) const { return rows.label(row); }
  template <class State>
  __device__ void store(std::int64_t row, const State& s) const {
    const LogNumber<double> lse = LogSumExp<double>{}.project(natural(s.softmax));
    const double target = natural(s.target);
    rows.store(row, {lse, target, natural(s.sum)});
    if (miss != nullptr) miss[row] = static_cast<float>(::expm1((target - lse.high) - lse.low));
  }
};
struct CrossEntropyTerms {
  CrossEntropyRows<float> rows;
  const float* miss;
  __device__ bool active(std::int64_t row) const { return rows.active(row); }
  __device__ RowTerms<1> terms(std::int64_t row) const {
    const auto u = rows.upstream(row);
    return {.lse = {bits(rows.product(row).lse)},
            .factor = {u.lse},
            .addend = u.sum,
            .at_label = u.lse * miss[row] + (u.lse + u.target + u.sum),
            .label = rows.valid(row) ? static_cast<int>(rows.label(row)) : -1};
  }
};
struct LogSumExpResults {
  LogSumExpRows<float> rows;
  __device__ std::int64_t label(std::int64_t row) const { return rows.label(row); }
  __device__ void store(std::int64_t row, LogSumExp<Bits>::State s) const {
    rows.store(row, rounded<float>(LogSumExp<double>{}.project(natural(s))));
  }
};

// Floats of partial states.
template <class M>
std::int64_t scratch_of(const FoldProblem& p) {
  return partial_bytes<M, Tile>(contraction_schedule<Tile>(p)) / static_cast<std::int64_t>(sizeof(float));
}

// What is kept of a call, its frames after `before` floats of the scratch; after them, a number a row.
KeptWeights<1> kept_of(const CrossEntropyForward& x, std::int64_t before) {
  return {.weights = {static_cast<__half*>(x.kept.data)},
          .frames = {static_cast<float*>(x.scratch.data) + before},
          .pitch = x.kept.stride[0],
          .columns = static_cast<int>(x.kept.size[1]),
          .tile_columns = Tile::kColumns};
}

CrossEntropyRows<float, double> rows_of(const CrossEntropyForward& x) {
  return {.target = static_cast<const std::int64_t*>(x.target.data),
          .target_stride = x.target.stride[0],
          .ignore_index = x.options.ignore_index,
          .rule = {static_cast<float>(x.options.label_smoothing), static_cast<float>(x.options.z_loss),
                   static_cast<float>(x.weight.size[0])},
          .loss = static_cast<float*>(x.loss.data),
          .lse = static_cast<float*>(x.lse.data),
          .lse_low = static_cast<float*>(x.lse_low.data),
          .grad_loss = {},
          .grad_lse = {}};
}

// The same forward, and local gradients for an upstream gradient of kept_upstream.
void cross_entropy_forward_keeping(const CrossEntropyForward& x, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const std::int64_t states = scratch_of<CrossEntropy<Bits>>(problem);
  const KeptWeights<1> kept = kept_of(x, states);
  float* const miss = kept.frames[0] + problem.rows() * kept.tiles();
  const CrossEntropyRows<float, double> rows = rows_of(x);
  const CrossEntropyTerms terms{{.target = rows.target,
                                 .target_stride = rows.target_stride,
                                 .ignore_index = rows.ignore_index,
                                 .rule = rows.rule,
                                 .loss = nullptr,
                                 .lse = rows.lse,
                                 .lse_low = rows.lse_low,
                                 .grad_loss = {static_cast<float*>(x.kept_upstream.data), 0},
                                 .grad_lse = {}},
                                miss};
  const ScaledScores<Bits> scores(problem.score, kLog2E);
  with_element(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    const auto run = [&](auto m) {
      fold_keeping<E, Tile>(m, scores, problem, CrossEntropyResults{rows, miss}, x.scratch.data, kept,
                            launch);
    };
    if (x.options.label_smoothing != 0) {
      run(CrossEntropy<Bits>{});
    } else {
      run(CrossEntropy<Bits, false>{});
    }
    weights_to_gradients<E>(kept, terms, problem, launch);
  });
}

}  // namespace

std::int64_t cross_entropy_forward_scratch(const CrossEntropyForward& x) {
  const FoldProblem problem = cross_entropy_problem(x);
  const std::int64_t states = scratch_of<CrossEntropy<Bits>>(problem);
  return x.kept.present() ? states + problem.rows() * (kept_of(x, states).tiles() + 1) : states;
}
std::int64_t logsumexp_forward_scratch(const LogSumExpForward& x) {
  return scratch_of<LogSumExp<Bits>>(logsumexp_problem(x));
}

void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch) {
  if (x.kept.present()) return cross_entropy_forward_keeping(x, launch);
  const FoldProblem problem = cross_entropy_problem(x);
  const CrossEntropyResults results{rows_of(x), nullptr};
  with_element(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    const auto run = [&](auto m, const auto& scores) {
      fold_contraction<E, Tile>(m, scores, problem, results, x.scratch.data, launch);
    };
    if (x.bias.present() || x.options.softcap != 0)
      return run(CrossEntropy<Bits>{},
                 LogitScores<Bits, E>(problem.score, kLog2E, x.bias, problem.columns()));
    const ScaledScores<Bits> scores(problem.score, kLog2E);
    if (x.options.label_smoothing != 0) return run(CrossEntropy<Bits>{}, scores);
    run(CrossEntropy<Bits, false>{}, scores);
  });
}

void logsumexp_forward(const LogSumExpForward& x, const Launch& launch) {
  const FoldProblem problem = logsumexp_problem(x);
  const LogSumExpResults results{{static_cast<float*>(x.lse.data), static_cast<float*>(x.lse_low.data), {}}};
  with_element(x.a.dtype, [&](auto element) {
    fold_contraction<decltype(element), Tile>(LogSumExp<Bits>{}, ScaledScores<Bits>(problem.score, kLog2E),
                                              problem, results, x.scratch.data, launch);
  });
}

}  // namespace monoidreduce::cuda::sm90
