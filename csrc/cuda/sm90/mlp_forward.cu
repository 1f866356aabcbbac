#include "../mlp.h"
#include "element.h"
#include "mlp.h"
#include "monoidreduce/block/fast_real.cuh"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/fold_forward_sm90.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/problems.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

template <class E>
struct MlpRows {
  const E* bias2;  // [payload width], or null
  std::int64_t stride;
  int width;
  template <class P>
  __device__ void store(std::int64_t, P, bool) const {}
  __device__ float output(float sum, int i) const {
    const int d = fragment_column(i);
    return bias2 && d < width ? sum + static_cast<float>(bias2[d * stride]) : sum;
  }
};

// TFLOP/s on an H200, 16384 x 16384, width 128: 128 columns 638, 176 columns 593.
using Width64 = ForwardTile<64, 64, 128, 2, 3, true>;
using Width128 = ForwardTile<128, 128, 128, 2, 2, true>;
using Width256 = ForwardTile<256, 256, 64, 2, 2, true>;

template <class E, class Tile, class Activation>
void run(const MlpForward& x, const Launch& launch) {
  using R = Fast<E>;
  const BiasedScores<R, E> scores{static_cast<const E*>(x.bias1.data), x.bias1.stride[0],
                                  static_cast<int>(x.w1.size[0])};
  const MlpRows<E> rows{static_cast<const E*>(x.bias2.data), x.bias2.stride[0],
                        static_cast<int>(x.w2.size[0])};
  fold_forward<E, Tile>(Sum<R, Activation>{}, scores, mlp_problem(x), rows, as_rows(x.out), {}, launch);
}

}  // namespace

void mlp_forward(const MlpForward& x, const Launch& launch) {
  const std::int64_t width = std::max(x.x.size[1], x.w2.size[0]);
  with_element(x.x.dtype, [&](auto element) {
    with_activation(x.activation, [&](auto activation) {
      using E = decltype(element);
      using Activation = decltype(activation);
      if (width <= 64) return run<E, Width64, Activation>(x, launch);
      if (width <= 128) return run<E, Width128, Activation>(x, launch);
      run<E, Width256, Activation>(x, launch);
    });
  });
}

}  // namespace monoidreduce::cuda::sm90
