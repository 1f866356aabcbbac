#include "../attention_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/fold_backward_sm80.cuh"
#include "tiles.h"

namespace monoidreduce::cuda::sm80 {

using namespace monoidreduce::sm80;

template <>
void run(const AttentionBackward& x, const Plan& plan, const Launch& launch) {
  attention_backward_passes<Biases::kElements, HalvesAndFloat>(
      x, plan, launch,
      [&](auto element, const auto& scores, const auto& problem, const auto& wanted,
          const BackwardScratch& scratch) {
        using E = decltype(element);
        with_backward_tile<E, false, kBiasedByElement<std::decay_t<decltype(scores)>>>(
            problem, [&](auto tile) {
              fold_backward<E, decltype(tile)>(LogSumExp<Bits>{}, scores, problem, wanted, scratch.residuals,
                                               scratch.marks, scratch.turns, launch);
            });
      });
}

}  // namespace monoidreduce::cuda::sm80
