#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/ops/cross_entropy.h"
#include "operator.h"

namespace monoidreduce::cuda::simt {
namespace {

// What forward and backward know alike about the rows.
template <class T, class Arguments>
CrossEntropyRows<T> rows_of(const Arguments& x) {
  const CrossEntropyLoss<T> rule{static_cast<T>(x.options.label_smoothing), static_cast<T>(x.options.z_loss)};
  return {.target = data<std::int64_t>(x.target),
          .target_stride = x.target.stride[0],
          .ignore_index = x.options.ignore_index,
          .classes = x.weight.size[0],
          .rule = rule,
          .loss = nullptr,
          .lse = data<T>(x.lse),
          .lse_low = data<T>(x.lse_low),
          .grad_loss = {},
          .grad_lse = {}};
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto rows = rows_of<T>(x);
    rows.loss = data<T>(x.loss);
    fold_forward<false>(CrossEntropy<T>{}, cross_entropy_problem(x), rows, {}, launch);
  });
}

void cross_entropy_backward(const CrossEntropyBackward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto rows = rows_of<T>(x);
    rows.grad_loss = row_vector<T>(x.grad_loss);
    rows.grad_lse = row_vector<T>(x.grad_lse);
    const FoldGradients wanted{
        .d_a = as_rows(x.d_x), .d_b = as_rows(x.d_weight), .d_bias = as_column_bias(x.d_bias, x.x.size[0])};
    fold_backward<false>(CrossEntropy<T>{}, cross_entropy_problem(x), rows, wanted, launch);
  });
}

}  // namespace monoidreduce::cuda::simt
