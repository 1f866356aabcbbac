#include "../element.h"
#include "linear_losses.h"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/fold_epilogue_sm90.cuh"
#include "monoidreduce/problems.h"
#include "monoidreduce/rows.h"
#include "natural.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Tile = ContractionTile<256, 4>;

struct CrossEntropyResults {
  CrossEntropyRows<float, double> rows;
  __device__ std::int64_t label(std::int64_t row) const { return rows.label(row); }
  template <class State>
  __device__ void store(std::int64_t row, const State& s) const {
    rows.store(row, {LogSumExp<double>{}.project(natural(s.softmax)), natural(s.target), natural(s.sum)});
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

}  // namespace

std::int64_t cross_entropy_forward_scratch(const CrossEntropyForward& x) {
  return scratch_of<CrossEntropy<Bits>>(cross_entropy_problem(x));
}
std::int64_t logsumexp_forward_scratch(const LogSumExpForward& x) {
  return scratch_of<LogSumExp<Bits>>(logsumexp_problem(x));
}

void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const CrossEntropyResults results{
      {.target = static_cast<const std::int64_t*>(x.target.data),
       .target_stride = x.target.stride[0],
       .ignore_index = x.options.ignore_index,
       .rule = {static_cast<float>(x.options.label_smoothing), static_cast<float>(x.options.z_loss),
                static_cast<float>(x.weight.size[0])},
       .loss = static_cast<float*>(x.loss.data),
       .lse = static_cast<float*>(x.lse.data),
       .lse_low = static_cast<float*>(x.lse_low.data),
       .grad_loss = {},
       .grad_lse = {}}};
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
