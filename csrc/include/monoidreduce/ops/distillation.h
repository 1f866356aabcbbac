// Linear distillation: the loss between the softmax distributions of a student's and a teacher's linear head.
#pragma once

#include <cmath>

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/monoids/distillation.h"
#include "monoidreduce/ops/cross_entropy.h"
#include "monoidreduce/ops/matrix.h"
#include "monoidreduce/ops/planes.h"
#include "monoidreduce/ops/rows.h"

namespace monoidreduce {

struct DistillationOptions {
  DistillationLoss loss = DistillationLoss::kCrossEntropy;
  double temperature = 1;
};
template <std::same_as<DistillationOptions> X>
constexpr auto describe(const X*) {
  return fields(choice("kind", &X::loss, "0, 1 or 2", kDistillationLossNames),
                option("temperature", &X::temperature, "a finite number > 0",
                       [](double t) { return t > 0 && std::isfinite(t); }));
}

template <class Call>
constexpr auto distillation_operands() {
  return fields(tensor("x", &Call::x, "N D"), tensor("weight", &Call::weight, "V D"),
                tensor("teacher_x", &Call::teacher_x, "N E"),
                tensor("teacher_weight", &Call::teacher_weight, "V E"),
                optional("mask", &Call::mask, "N", Type::kBool));
}

struct DistillationForward {
  TensorView x, weight, teacher_x, teacher_weight, mask, loss, stats;
  TensorView reduced, scratch;  // as for cross entropy
  // As for cross entropy; not for the reverse KL. kept: derivatives with respect to the student's dot products. teacher_kept,
  // of the same size: the teacher's softmax weights, from which these are also computed.
  TensorView kept, teacher_kept;
  TensorView order, gathered, teacher_gathered;  // as for cross entropy
  TensorView row_planes, column_planes, other_row_planes,
      other_column_planes;  // of the student's operands, the teacher's
  bool mean = false;
  double kept_upstream = 0;
  DistillationOptions options;
  std::int64_t saved_columns = 0;  // as for cross entropy
};
template <class Call>
void check_teacher_kept(const Call& x) {
  check_kept(x);
  if (!x.kept.present()) return;
  require(x.teacher_kept.present(), "teacher_kept: expected a tensor, got none");
  require(x.teacher_kept.stride[0] == x.kept.stride[0], "teacher_kept: expected the strides of kept, got ",
          x.teacher_kept.stride[0]);
  require(x.options.loss != DistillationLoss::kReverseKL,
          "kept: expected none for the reverse KL, got a tensor");
}
inline void check_both_gathered(const DistillationForward& x) {
  check_gathered("gathered", x, x.gathered);
  check_gathered("teacher_gathered", x, x.teacher_gathered);
}
template <std::same_as<DistillationForward> X>
constexpr auto describe(const X*) {
  return pass("distillation_forward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, distillation_operands<X>(),
              result("loss", &X::loss, "N", Type::kAccumulation),
              result("reduced", &X::reduced, "values=1", Type::kAccumulation).maybe(),
              result("stats", &X::stats, "statistics=6 N", Type::kAccumulation),
              scratch("scratch", &X::scratch), result("kept", &X::kept, "N K").maybe().strided(),
              result("teacher_kept", &X::teacher_kept, "N K").maybe().strided().where(&check_teacher_kept<X>),
              order_of(&X::order, "N").where(&check_no_order_on_cpu<X>),
              optional("gathered", &X::gathered, "R D").dense(),
              optional("teacher_gathered", &X::teacher_gathered, "R E").dense().where(&check_both_gathered),
              planes_of_operands<X>("N", "V", "D"), planes_of_other_operands<X>("N", "V", "E"),
              option("mean", &X::mean), option("kept_upstream", &X::kept_upstream), options(&X::options),
              saved_columns(&X::saved_columns));
}

// Like CrossEntropyKeptGradients. frames: those of the student's weights, then those of the teacher's.
struct DistillationKeptGradients {
  TensorView x, weight, teacher_x, teacher_weight, mask, stats, frames, kept, teacher_kept, order;
  double kept_upstream = 1;
  DistillationOptions options;
};
template <std::same_as<DistillationKeptGradients> X>
constexpr auto describe(const X*) {
  return after<DistillationForward>(
      "distillation_kept_gradients", kSm90, distillation_operands<X>(),
      tensor("stats", &X::stats, "statistics=6 N", Type::kAccumulation).dense(),
      tensor("frames", &X::frames, "F", Type::kAccumulation).dense(),
      result("kept", &X::kept, "N K").strided(),
      result("teacher_kept", &X::teacher_kept, "N K").strided().where(&check_teacher_kept<X>),
      order_of(&X::order, "N"), option("kept_upstream", &X::kept_upstream), options(&X::options));
}

struct DistillationBackward {
  TensorView grad_loss, x, weight, teacher_x, teacher_weight, mask, stats;
  TensorView d_x, d_weight, d_teacher_x, d_teacher_weight;
  DistillationOptions options;
  std::int64_t workspace = 0;  // as for cross entropy
};
template <std::same_as<DistillationBackward> X>
constexpr auto describe(const X*) {
  return pass("distillation_backward", kCpu | kSimt, distillation_operands<X>(),
              tensor("grad_loss", &X::grad_loss, "N", Type::kAccumulation),
              tensor("stats", &X::stats, "statistics=6 N", Type::kAccumulation).dense(),
              gradient("dx", &X::d_x, "N D"), gradient("dweight", &X::d_weight, "V D"),
              gradient("dteacher_x", &X::d_teacher_x, "N E"),
              gradient("dteacher_weight", &X::d_teacher_weight, "V E"), options(&X::options),
              workspace(&X::workspace));
}

// Like CrossEntropyLocalGradient, for the classes in weight and teacher_weight. If teacher_out is absent, it is not computed.
struct DistillationLocalGradient {
  TensorView grad_loss, x, weight, teacher_x, teacher_weight, mask, stats, out, teacher_out, order;
  TensorView row_planes, column_planes, other_row_planes, other_column_planes;  // as in DistillationForward
  DistillationOptions options;
};
template <std::same_as<DistillationLocalGradient> X>
constexpr auto describe(const X*) {
  return part<DistillationBackward>(
      "distillation_local_gradient", kSm80 | kSm90 | kPlanes, distillation_operands<X>(),
      tensor("grad_loss", &X::grad_loss, "N", Type::kAccumulation),
      tensor("stats", &X::stats, "statistics=6 N", Type::kAccumulation).dense(),
      result("out", &X::out, "N V").strided(),
      result("teacher_out", &X::teacher_out, "N V").strided().maybe(), order_of(&X::order, "N"),
      planes_of_operands<X>("N", "V", "D"), planes_of_other_operands<X>("N", "V", "E"), options(&X::options));
}

template <class Call>
[[gnu::always_inline]] inline FoldProblem distillation_problem(const Call& x) {
  FoldProblem p{.a = as_rows(x.x),
                .b = as_rows(x.weight),
                .other_a = as_rows(x.teacher_x),
                .other_b = as_rows(x.teacher_weight),
                .score = {.scale = 1 / x.options.temperature}};
  if constexpr (requires { x.order; }) p.order = x.order;
  if constexpr (requires { x.row_planes; }) return with_planes(x, p);
  return p;
}

}  // namespace monoidreduce
