#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/ops/cross_entropy.h"
#include "operator.h"
#include "simt_splits.cuh"

namespace monoidreduce::cuda::simt {

template <>
void run(const CrossEntropyForward& x, const Plan& plan, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_cross_entropy<T>(x, [&](const auto& m) {
      fold_forward<false>(m, cross_entropy_problem(x), cross_entropy_rows<T>(x), {}, launch,
                          splits_of(plan, x.scratch));
    });
  });
}

template <>
void run(const CrossEntropyBackward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients wanted{
        .d_a = as_rows(x.d_x), .d_b = as_rows(x.d_weight), .d_bias = as_column_bias(x.d_bias, x.x.size[0])};
    with_cross_entropy<T>(x, [&](const auto& m) {
      fold_backward<false>(m, cross_entropy_problem(x), cross_entropy_rows<T>(x), wanted, launch);
    });
  });
}

}  // namespace monoidreduce::cuda::simt
