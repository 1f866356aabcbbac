#include "../engine.h"
#include "../mlp_passes.cuh"
#include "backward_kernels.cuh"

namespace monoidreduce::cuda::sm90 {

template <>
void run(const MlpBackward& x, const Plan&, const Launch& launch) {
  mlp_backward_pass(
      x, [&](auto element, const auto& m, const auto& scores, const auto& problem, const auto& wanted) {
        backward_kernels<decltype(element), true>(m, scores, problem, wanted, {}, {}, {}, nullptr, launch);
      });
}

}  // namespace monoidreduce::cuda::sm90
