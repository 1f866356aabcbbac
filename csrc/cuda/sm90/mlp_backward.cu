#include "../mlp.h"
#include "element.h"
#include "mlp.h"
#include "monoidreduce/block/fast_real.cuh"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/fold_backward_sm90.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/problems.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Width64 = BackwardTile<64, 128, true>;
using Width128 = BackwardTile<128, 64, true>;

template <class E, class Tile, class Activation>
void run(const MlpBackward& x, const Launch& launch) {
  using R = Fast<E>;
  const BiasedScores<R, E> scores{static_cast<const E*>(x.bias1.data), x.bias1.stride[0],
                                  static_cast<int>(x.w1.size[0])};
  const FoldGradients wanted{.grad_out = as_rows(x.grad_out),
                             .d_a = as_rows(x.d_x),
                             .d_b = as_rows(x.d_w1),
                             .d_payload = as_rows(transposed(x.d_w2)),
                             .d_bias = x.d_bias1};
  fold_backward<E, Tile>(Sum<R, Activation>{}, scores, mlp_problem(x), wanted, {}, {}, launch);
}

}  // namespace

void mlp_backward(const MlpBackward& x, const Launch& launch) {
  const std::int64_t width = std::max(x.x.size[1], x.w2.size[0]);
  with_element(x.x.dtype, [&](auto element) {
    with_activation(x.activation, [&](auto activation) {
      using E = decltype(element);
      using Activation = decltype(activation);
      if (width <= 64) return run<E, Width64, Activation>(x, launch);
      run<E, Width128, Activation>(x, launch);
    });
  });
}

}  // namespace monoidreduce::cuda::sm90
