#include "../mlp_passes.cuh"
#include "../tensor_cores.h"
#include "monoidreduce/kernel/fold_forward_sm80.cuh"
#include "tiles.h"

namespace monoidreduce::cuda::sm80 {
namespace {

using namespace monoidreduce::sm80;

template <class E>
struct Tiles {
  using Width64 = ForwardTile<64, 64, 2, 2, 3, true>;
  using Width128 = ForwardTile<128, 64, 2, 2, 2, true>;
  using Width256 = ForwardTile<256, 64, 1, 2, 2, true>;
};
template <>
struct Tiles<float> : FloatForwardTiles<true> {};

}  // namespace

void mlp_forward(const MlpForward& x, const Launch& launch) {
  const std::int64_t width = std::max(x.x.size[1], x.w2.size[0]);
  // A kernel for each activation: where a branch to it separates a warp's two products, none of the activations hides behind the
  // second. (H100, 16384 rows: width 64, bfloat16 0.151 ms with gelu_tanh, 0.174 with one kernel for all; float 0.153, 0.201; width
  // 128, 0.224, 0.245 and 0.244, 0.294.)
  mlp_forward_pass<HalvesAndFloat>(x, [&](auto element, const auto& named, const auto& scores,
                                          const auto& problem, const auto& rows, const TensorView& out) {
    using E = decltype(element);
    with_named(named, [&](const auto& m) {
      with_forward_tile<Tiles<E>>(
          width, [&](auto tile) { fold_forward<E, decltype(tile)>(m, scores, problem, rows, out, launch); });
    });
  });
}

}  // namespace monoidreduce::cuda::sm80
