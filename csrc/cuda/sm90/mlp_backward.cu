#include "../mlp_passes.cuh"
#include "../tensor_cores.h"
#include "monoidreduce/kernel/fold_backward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Width64 = BackwardTile<64, 128, true>;
using Width128 = BackwardTile<128, 64, true>;

}  // namespace

void mlp_backward(const MlpBackward& x, const Launch& launch) {
  const std::int64_t width = std::max(x.x.size[1], x.w2.size[0]);
  mlp_backward_pass(
      x, [&](auto element, const auto& m, const auto& scores, const auto& problem, const auto& wanted) {
        using E = decltype(element);
        if (width <= 64) return fold_backward<E, Width64>(m, scores, problem, wanted, {}, {}, launch);
        fold_backward<E, Width128>(m, scores, problem, wanted, {}, {}, launch);
      });
}

}  // namespace monoidreduce::cuda::sm90
