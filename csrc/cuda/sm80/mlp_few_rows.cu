#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/fold_forward_sm80.cuh"
#include "tiles.h"

namespace monoidreduce::cuda::sm80 {
namespace {

using namespace monoidreduce::sm80;

template <class E, class Run>
void with_tile(const FoldProblem& p, Run run) {
  with_forward_tile<MlpForwardTiles<E>>(std::max(p.width(), p.payload_width()), run);
}

}  // namespace

void mlp_few_rows(const MlpForward& x, const Packing& packing, const Launch& launch) {
  mlp_forward_pass<HalvesAndFloat>(x, [&](auto element, const auto& m, const auto& scores,
                                          const auto& problem, const auto& rows, const FoldOutput& out) {
    using E = decltype(element);
    with_tile<E>(problem, [&](auto tile) {
      fold_few_rows<E, decltype(tile)>(m, scores, problem, packing.splits, rows, out, data<float>(x.scratch),
                                       launch);
    });
  });
}

}  // namespace monoidreduce::cuda::sm80
