#include "../attention_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/fold_forward_sm80.cuh"
#include "tiles.h"

namespace monoidreduce::cuda::sm80 {
namespace {

using namespace monoidreduce::sm80;

// TFLOP/s on an H100. Width 64, 8k tokens: with 2 stages full 316 and causal 281, with 3 stages 317 and 301.
// Width 128, 16k, full: with 2 stages 371, with 3 stages 360. A score bias takes registers, so it leaves
// fewer blocks.
template <class E, class Scores>
struct Tiles {
  using Width64 = ForwardTile<64, 64, 2, 3, kBiasedByElement<Scores> ? 2 : 3>;
  using Width128 = ForwardTile<128, 64, 2, 2, 2>;
  using Width256 = ForwardTile<256, 64, 1, 2, 2>;
};
template <class Scores>
struct Tiles<float, Scores> : FloatForwardTiles<false> {};

}  // namespace

template <>
void run(const AttentionForward& x, const Plan&, const Launch& launch) {
  const std::int64_t width = std::max(x.q.size[3], x.v.size[3]);
  const FoldProblem problem = attention_problem(x);
  with_attention_rows<Biases::kElements, HalvesAndFloat>(
      x, problem, [&](auto element, const auto& scores, const auto& rows) {
        using E = decltype(element);
        const LogSumExp<Bits> m;
        with_forward_tile<Tiles<E, std::decay_t<decltype(scores)>>>(width, [&](auto tile) {
          fold_forward<E, decltype(tile)>(m, scores, problem, rows, {x.out, x.out_low}, launch);
        });
      });
  repair_attention(x, problem, launch);
}

}  // namespace monoidreduce::cuda::sm80
