// Linear cross entropy against class indices on the CPU.
#include "monoidreduce/monoids/cross_entropy.h"
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/ops/cross_entropy.h"
#include "monoidreduce/rows.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {
namespace {

template <class T, class Arguments>
CrossEntropyRows<T> cross_entropy_rows(const Arguments& x) {
  CrossEntropyRows<T> rows{};
  rows.target = static_cast<const std::int64_t*>(x.target.data);
  rows.target_stride = x.target.stride[0];
  rows.ignore_index = x.options.ignore_index;
  rows.classes = x.weight.size[0];
  rows.rule = {static_cast<T>(x.options.label_smoothing), static_cast<T>(x.options.z_loss)};
  rows.lse = static_cast<T*>(x.lse.data);
  rows.lse_low = static_cast<T*>(x.lse_low.data);
  return rows;
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    CrossEntropyRows<T> rows = cross_entropy_rows<T>(x);
    rows.loss = static_cast<T*>(x.loss.data);
    fold_forward<CrossEntropy, T>({}, cross_entropy_problem(x), rows, {}, launch.threads);
  });
}

void cross_entropy_backward(const CrossEntropyBackward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    CrossEntropyRows<T> rows = cross_entropy_rows<T>(x);
    rows.grad_loss = row_vector<T>(x.grad_loss);
    rows.grad_lse = row_vector<T>(x.grad_lse);
    const FoldGradients gradients{.grad_out = {},
                                  .d_a = as_rows(x.d_x),
                                  .d_b = as_rows(x.d_weight),
                                  .d_other_a = {},
                                  .d_other_b = {},
                                  .d_payload = {},
                                  .d_bias = as_column_bias(x.d_bias, x.x.size[0])};
    fold_backward<CrossEntropy, T>({}, cross_entropy_problem(x), rows, gradients, launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
