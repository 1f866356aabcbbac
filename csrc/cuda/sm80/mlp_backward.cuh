// The MLP's backward pass, a template over element types. 16-bit types and float have sources of their own:
// together, their kernels take a compiler more than a GiB of memory.
#pragma once

#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/fold_backward_sm80.cuh"
#include "tiles.h"

namespace monoidreduce::cuda::sm80 {

using namespace monoidreduce::sm80;

template <class Elements>
void mlp_backward_of(const MlpBackward& x, const Launch& launch) {
  mlp_backward_pass<Elements>(
      x, [&](auto element, const auto& m, const auto& scores, const auto& problem, const auto& wanted) {
        using E = decltype(element);
        with_backward_tile<E, true, false>(problem, [&](auto tile) {
          fold_backward<E, decltype(tile)>(m, scores, problem, wanted, {}, {}, {}, launch);
        });
      });
}

void mlp_backward_tf32(const MlpBackward& x, const Launch& launch);

}  // namespace monoidreduce::cuda::sm80
