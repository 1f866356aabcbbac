#include "../attention_passes.cuh"
#include "../tensor_cores.h"
#include "backward_kernels.cuh"

namespace monoidreduce::cuda::sm90 {

JobSharing backward_sharing(const FoldProblem& p) {
  return p.range.all() ? columns_in_parts<false>(p) : JobSharing::by_counter();
}

void attention_backward(const AttentionBackward& x, const Launch& launch) {
  attention_backward_passes<Biases::kTiles>(x, false, backward_sharing(attention_problem(x)), launch,
                                            [&](auto element, const auto& scores, const auto& problem,
                                                const auto& wanted, const BackwardScratch& scratch) {
                                              backward_kernels<decltype(element), false>(
                                                  LogSumExp<Bits>{}, scores, problem, wanted,
                                                  scratch.residuals, scratch.marks, scratch.sharing, launch);
                                            });
}

}  // namespace monoidreduce::cuda::sm90
