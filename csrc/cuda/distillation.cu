#include "monoidreduce/kernel/fold_backward_simt.cuh"
#include "monoidreduce/kernel/fold_forward_simt.cuh"
#include "monoidreduce/problems.h"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

// Calls run(T{}, loss), loss a compile-time constant.
template <class Run>
void with_loss(DType dtype, DistillationLoss loss, Run run) {
  with_accumulation(dtype, [&](auto zero) {
    using enum DistillationLoss;
    switch (loss) {
      case kCrossEntropy:
        return run(zero, std::integral_constant<DistillationLoss, kCrossEntropy>{});
      case kForwardKL:
        return run(zero, std::integral_constant<DistillationLoss, kForwardKL>{});
      case kReverseKL:
        return run(zero, std::integral_constant<DistillationLoss, kReverseKL>{});
    }
  });
}

template <class T, DistillationLoss kLoss, class Arguments>
DistillationRows<T, kLoss> rows_of(const Arguments& x) {
  return {.mask = data<bool>(x.mask),
          .mask_stride = x.mask.stride[0],
          .rows = x.x.size[0],
          .loss = nullptr,
          .stats = data<T>(x.stats),
          .grad_loss = {}};
}

}  // namespace

void distillation_forward(const DistillationForward& x, const Launch& launch) {
  with_loss(x.x.dtype, x.options.loss, [&](auto zero, auto loss) {
    using T = decltype(zero);
    auto rows = rows_of<T, loss()>(x);
    rows.loss = data<T>(x.loss);
    fold_forward<false>(Distillation<T, loss()>{}, distillation_problem(x), rows, {}, launch);
  });
  count_simt("distillation_forward", x.x.dtype);
}

void distillation_backward(const DistillationBackward& x, const Launch& launch) {
  with_loss(x.x.dtype, x.options.loss, [&](auto zero, auto loss) {
    using T = decltype(zero);
    auto rows = rows_of<T, loss()>(x);
    rows.grad_loss = row_vector<T>(x.grad_loss);
    const FoldGradients wanted{.d_a = as_rows(x.d_x),
                               .d_b = as_rows(x.d_weight),
                               .d_other_a = as_rows(x.d_teacher_x),
                               .d_other_b = as_rows(x.d_teacher_weight)};
    fold_backward<false>(Distillation<T, loss()>{}, distillation_problem(x), rows, wanted, launch);
  });
  count_simt("distillation_backward", x.x.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
