#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/fold_forward_sm80.cuh"
#include "tiles.h"

namespace monoidreduce::cuda::sm80 {

using namespace monoidreduce::sm80;

template <>
void run(const MlpForward& x, const Plan& plan, const Launch& launch) {
  if (plan.packing) return mlp_few_rows(x, *plan.packing, launch);
  const std::int64_t width = std::max(x.x.size[1], x.w2.size[0]);
  mlp_forward_pass<HalvesAndFloat>(x, [&](auto element, const auto& named, const auto& scores,
                                          const auto& problem, const auto& rows, const FoldOutput& out) {
    using E = decltype(element);
    with_own_kernel(named, [&](const auto& m) {
      with_forward_tile<MlpForwardTiles<E>>(
          width, [&](auto tile) { fold_forward<E, decltype(tile)>(m, scores, problem, rows, out, launch); });
    });
  });
}

}  // namespace monoidreduce::cuda::sm80
