#include "../engine.h"
#include "../logsumexp_folds.cuh"
#include "monoidreduce/launch/fold_forward_sm80.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using namespace monoidreduce::sm80;

// The tiles of attention.
struct MeanTiles {
  using Width64 = ForwardTile<64, 64, 2, 3, 3>;
  using Width128 = ForwardTile<128, 64, 2, 2, 2>;
};
// What the score policy reads of rows takes registers: with more blocks, or more columns, kernels spill.
struct GradientTiles {
  using Width64 = ForwardTile<64, 64, 2, 2, 2>;
  using Width128 = ForwardTile<128, 32, 2, 2, 2>;
};

template <class Tiles>
auto fold(const Launch& launch) {
  return [&](auto element, const auto& m, const auto& scores, const FoldProblem& p, const auto& rows,
             const FoldOutput& out) {
    using E = decltype(element);
    if (p.width() <= 64) return fold_forward<E, typename Tiles::Width64>(m, scores, p, rows, out, launch);
    fold_forward<E, typename Tiles::Width128>(m, scores, p, rows, out, launch);
  };
}

}  // namespace

void logsumexp_mean(const LogSumExpForward& x, const Launch& launch) {
  logsumexp_mean_pass(x, fold<MeanTiles>(launch));
}
template <>
void run(const LogSumExpBackward& x, const Plan&, const Launch& launch) {
  logsumexp_gradient_folds(x, launch, fold<GradientTiles>(launch));
}

}  // namespace monoidreduce::cuda::sm80
