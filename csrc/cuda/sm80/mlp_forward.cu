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
  mlp_forward_pass<HalvesAndFloat>(x, [&](auto element, const auto& named, const auto& scores,
                                          const auto& problem, const auto& rows, const TensorView& out) {
    using E = decltype(element);
    with_own_kernel(named, [&](const auto& m) {
      with_forward_tile<Tiles<E>>(
          width, [&](auto tile) { fold_forward<E, decltype(tile)>(m, scores, problem, rows, out, launch); });
    });
  });
}

}  // namespace monoidreduce::cuda::sm80
