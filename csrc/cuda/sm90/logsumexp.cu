#include "../../plan/tiles.h"
#include "../engine.h"
#include "../logsumexp_folds.cuh"
#include "monoidreduce/launch/fold_forward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

struct MeanTiles {
  using Width64 = ForwardTile<64, 64, 128, 3, 2>;
  using Width128 = ForwardTile<128, 128, 192, 2, 2>;
};
struct GradientTiles {
  using Width64 = ForwardTile<64, 64, 128, 2, 3>;
  using Width128 = ForwardTile<128, 128, 128, 2, 2>;
};

template <class Tiles>
constexpr bool planned(TileSize (*tile)(std::int64_t)) {
  const auto is = [&](auto of_width) {
    const TileSize size = tile(of_width.kWidth);
    return size.rows == of_width.kRows && size.columns == of_width.kColumns;
  };
  return is(typename Tiles::Width64{}) && is(typename Tiles::Width128{});
}
static_assert(planned<MeanTiles>(tiles::narrow_forward) && planned<GradientTiles>(tiles::narrow_backward));

template <class Tiles>
constexpr auto fold(const Launch& launch) {
  return [&](auto element, const auto& m, const auto& scores, const FoldProblem& p, const auto& rows,
             const FoldOutput& out) {
    using E = decltype(element);
    if (p.width() <= 64)
      return fold_forward<E, typename Tiles::Width64>(m, scores, p, rows, out, nullptr, launch);
    fold_forward<E, typename Tiles::Width128>(m, scores, p, rows, out, nullptr, launch);
  };
}

}  // namespace

void logsumexp_mean(const LogSumExpForward& x, const Launch& launch) {
  logsumexp_mean_pass(x, fold<MeanTiles>(launch));
}
void logsumexp_backward(const LogSumExpBackward& x, const Plan&, const Launch& launch) {
  logsumexp_gradient_folds(x, launch, fold<GradientTiles>(launch));
}

}  // namespace monoidreduce::cuda::sm90
