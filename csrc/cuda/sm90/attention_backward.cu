#include "../attention_passes.cuh"
#include "../tensor_cores.h"
#include "backward_kernels.cuh"

namespace monoidreduce::cuda::sm90 {

void attention_backward(const AttentionBackward& x, const Launch& launch) {
  attention_backward_passes<Biases::kTiles>(x, false, launch,
                                            [&](auto element, const auto& scores, const auto& problem,
                                                const auto& wanted, const BackwardScratch& scratch) {
                                              backward_kernels<decltype(element), false>(
                                                  LogSumExp<Bits>{}, scores, problem, wanted,
                                                  scratch.residuals, scratch.marks, launch);
                                            });
}

}  // namespace monoidreduce::cuda::sm90
