#include "../mlp_passes.cuh"
#include "../tensor_cores.h"
#include "monoidreduce/kernel/fold_backward_sm80.cuh"
#include "tiles.h"

namespace monoidreduce::cuda::sm80 {

using namespace monoidreduce::sm80;

void mlp_backward(const MlpBackward& x, const Launch& launch) {
  mlp_backward_pass<HalvesAndFloat>(
      x, [&](auto element, const auto& m, const auto& scores, const auto& problem, const auto& wanted) {
        using E = decltype(element);
        with_backward_tile<E, true, false>(problem, [&](auto tile) {
          fold_backward<E, decltype(tile)>(m, scores, problem, wanted, {}, {}, {}, launch);
        });
      });
}

}  // namespace monoidreduce::cuda::sm80
