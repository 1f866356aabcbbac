#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/ops/distillation.h"
#include "operator.h"
#include "simt_splits.cuh"

namespace monoidreduce::cuda::simt {
namespace {

template <class T, class Arguments>
DistillationRows<T> rows_of(const Arguments& x) {
  return {.mask = data<bool>(x.mask),
          .mask_stride = x.mask.stride[0],
          .rows = x.x.size[0],
          .loss = nullptr,
          .stats = data<T>(x.stats),
          .grad_loss = {}};
}

}  // namespace

template <>
void run(const DistillationForward& x, const Plan& plan, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto rows = rows_of<T>(x);
    rows.loss = data<T>(x.loss);
    fold_forward<false>(NamedDistillation<T>{{}, x.options.loss}, distillation_problem(x), rows, {}, launch,
                        splits_of(plan, x.scratch));
  });
}

template <>
void run(const DistillationBackward& x, const Plan&, const Launch& launch) {
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto rows = rows_of<T>(x);
    rows.grad_loss = row_vector<T>(x.grad_loss);
    const FoldGradients wanted{.d_a = as_rows(x.d_x),
                               .d_b = as_rows(x.d_weight),
                               .d_other_a = as_rows(x.d_teacher_x),
                               .d_other_b = as_rows(x.d_teacher_weight)};
    fold_backward<false>(NamedDistillation<T>{{}, x.options.loss}, distillation_problem(x), rows, wanted,
                         launch);
  });
}

}  // namespace monoidreduce::cuda::simt
