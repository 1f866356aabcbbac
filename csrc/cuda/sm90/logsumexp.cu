#include "../../plan/tiles.h"
#include "../engine.h"
#include "../logsumexp_folds.cuh"
#include "monoidreduce/launch/fold_forward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

// As many stages as fit in shared memory.
using Width64 = ForwardTile<64, 64, 128, 2, 4>;
using Width128 = ForwardTile<128, 128, 128, 2, 2>;

template <class Tile>
constexpr bool planned = tiles::kNarrow.rows == Tile::kRows && tiles::kNarrow.columns == Tile::kColumns;
static_assert(planned<Width64> && planned<Width128>);

auto fold(const Launch& launch) {
  return [&](auto element, const auto& m, const auto& scores, const FoldProblem& p, const auto& rows,
             const FoldOutput& out) {
    using E = decltype(element);
    if (p.width() <= 64) return fold_forward<E, Width64>(m, scores, p, rows, out, launch);
    fold_forward<E, Width128>(m, scores, p, rows, out, launch);
  };
}

}  // namespace

void logsumexp_mean(const LogSumExpForward& x, const Launch& launch) { logsumexp_mean_pass(x, fold(launch)); }
template <>
void run(const LogSumExpBackward& x, const Plan&, const Launch& launch) {
  logsumexp_gradient_folds(x, launch, fold(launch));
}

}  // namespace monoidreduce::cuda::sm90
