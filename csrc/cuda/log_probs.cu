#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/ops/log_probs.h"
#include "operator.h"
#include "simt_splits.cuh"

namespace monoidreduce::cuda::simt {
namespace {

using namespace monoidreduce::simt;

// Scores by score.h, of the classes that a row keeps.
template <class T>
struct KeptScores : Score<T> {
  KeptClasses kept;
};
template <class T>
struct KeptScoresOfHead : BiasedScoresOfHead<T> {
  const KeptClasses& kept;
  __device__ bool masks() const { return kept.some(); }
  __device__ bool keeps(std::int64_t row, std::int64_t column) const { return kept(row, column); }
};
template <class T>
__device__ __forceinline__ KeptScoresOfHead<T> scores_of_head(const KeptScores<T>& scores, const Tensor& bias,
                                                              std::int64_t batch, std::int64_t head) {
  return {{scores, Matrix<T>(bias, batch, head)}, scores.kept};
}
template <class T, class Call>
KeptScores<T> kept_scores(const Call& x, const FoldProblem& p) {
  return {Score<T>(p.score), kept_classes(x)};
}

}  // namespace

template <>
void run(const LogProbsForward& x, const Plan& plan, const Launch& launch) {
  const FoldProblem p = cross_entropy_problem(x);
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_log_probs<T>(x, [&](const auto& m) {
      monoidreduce::fold_forward<false>(m, p, kept_scores<T>(x, p), log_probs_rows<T>(x), {},
                                        splits_of(plan, x.scratch), launch);
    });
  });
}

template <>
void run(const LogProbsBackward& x, const Plan&, const Launch& launch) {
  const FoldProblem p = cross_entropy_problem(x);
  const DeviceGuard device(p.a.cuda_device);
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients wanted{
        .d_a = as_rows(x.d_x), .d_b = as_rows(x.d_weight), .d_bias = as_column_bias(x.d_bias, x.x.size[0])};
    const auto run = [&](const PullArguments& arguments, const Walk& walk, unsigned blocks) {
      launch_kernel("fold_backward_simt",
                    &monoidreduce::simt::fold_backward<false, LogProbs<T>, LogProbsRows<T>, KeptScores<T>>,
                    blocks, kThreads, sizeof(TileMemory<T>), launch.stream, LogProbs<T>{}, arguments,
                    kept_scores<T>(x, p), log_probs_rows<T>(x), walk);
    };
    backward_launches<false, LogProbs<T>::kScores>(p, wanted, launch.deterministic, run);
  });
}

}  // namespace monoidreduce::cuda::simt
