#include "../attention_passes.cuh"
#include "../tensor_cores.h"
#include "monoidreduce/launch/fold_forward_sm80.cuh"
#include "tiles.h"

namespace monoidreduce::cuda::sm80 {
namespace {

using namespace monoidreduce::sm80;

// TFLOP/s on an H100, 8k tokens, width 64: 2 stages full 316 and causal 281, 3 stages 317 and 301; width 128, 16k, full:
// 2 stages 371, 3 stages 360. A bias of scores takes registers.
template <class E, class Scores>
struct Tiles {
  using Width64 = ForwardTile<64, 64, 2, 3, kBiasedByElement<Scores> ? 2 : 3>;
  using Width128 = ForwardTile<128, 64, 2, 2, 2>;
  using Width256 = ForwardTile<256, 64, 1, 2, 2>;
};
template <class Scores>
struct Tiles<float, Scores> : FloatForwardTiles<false> {};

}  // namespace

void attention_forward(const AttentionForward& x, const Launch& launch) {
  const std::int64_t width = std::max(x.q.size[3], x.v.size[3]);
  attention_forward_passes<Biases::kElements, HalvesAndFloat>(
      x, launch, [&](auto element, const auto& scores, const auto& problem, const auto& rows) {
        using E = decltype(element);
        const LogSumExp<Bits> m;
        with_forward_tile<Tiles<E, std::decay_t<decltype(scores)>>>(width, [&](auto tile) {
          fold_forward<E, decltype(tile)>(m, scores, problem, rows, x.out, launch);
        });
      });
}

}  // namespace monoidreduce::cuda::sm80
