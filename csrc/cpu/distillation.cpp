// Linear distillation on the CPU: cross entropy and divergences between two linear heads.
#include "monoidreduce/monoids/distillation.h"
#include "engine.h"
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/ops/distillation.h"
#include "monoidreduce/rows.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

namespace {

template <class T, class Arguments>
DistillationRows<T> distillation_rows(const Arguments& x) {
  DistillationRows<T> rows{};
  rows.mask = static_cast<const bool*>(x.mask.data);
  rows.mask_stride = x.mask.stride[0];
  rows.rows = x.x.size[0];
  rows.stats = static_cast<T*>(x.stats.data);
  return rows;
}

}  // namespace

template <>
void run(const DistillationForward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    DistillationRows<T> rows = distillation_rows<T>(x);
    rows.loss = static_cast<T*>(x.loss.data);
    fold_forward<NamedDistillation, T>({{}, x.options.loss}, distillation_problem(x), rows, {},
                                       launch.threads);
  });
}

template <>
void run(const DistillationBackward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    DistillationRows<T> rows = distillation_rows<T>(x);
    rows.grad_loss = row_vector<T>(x.grad_loss);
    const FoldGradients gradients{.grad_out = {},
                                  .d_a = as_rows(x.d_x),
                                  .d_b = as_rows(x.d_weight),
                                  .d_other_a = as_rows(x.d_teacher_x),
                                  .d_other_b = as_rows(x.d_teacher_weight),
                                  .d_payload = {},
                                  .d_bias = {}};
    fold_backward<NamedDistillation, T>({{}, x.options.loss}, distillation_problem(x), rows, gradients,
                                        launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
