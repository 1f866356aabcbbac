// The two-layer MLP: act(x w1^T + bias1) w2^T + bias2.
#pragma once

#include "monoidreduce/activation.h"
#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/matrix.h"
#include "monoidreduce/ops/planes.h"

namespace monoidreduce {

template <class Call>
constexpr auto activation_of(ActivationKind Call::* member) {
  return choice("activation", member, "an index in [0, 7]", kActivationNames);
}
template <class Call>
constexpr auto mlp_operands() {
  return fields(tensor("x", &Call::x, "B M"), tensor("w1", &Call::w1, "K M"), tensor("w2", &Call::w2, "N K"),
                optional("bias1", &Call::bias1, "K"));
}

struct MlpForward {
  TensorView x, w1, w2, bias1, bias2, out;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  ActivationKind activation = ActivationKind::kIdentity;
  std::int64_t workspace = 0;  // bytes for hidden values, if the MLP must run in parts (Plan::part)
};
template <std::same_as<MlpForward> X>
constexpr auto describe(const X*) {
  return pass("mlp_forward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, mlp_operands<X>(),
              optional("bias2", &X::bias2, "N"), result("out", &X::out, "B N", Type::kSameOrAccumulation),
              scratch("scratch", &X::scratch), activation_of(&X::activation), workspace(&X::workspace));
}

struct MlpBackward {
  TensorView grad_out, x, w1, w2, bias1;
  TensorView d_x, d_w1, d_w2, d_bias1;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  ActivationKind activation = ActivationKind::kIdentity;
  std::int64_t workspace = 0;
};
inline void check_bias_gradient(const MlpBackward& x) {
  require(!x.d_bias1.present() || x.bias1.present(),
          "dbias1: expected none where bias1 is none, got a tensor");
}
template <std::same_as<MlpBackward> X>
constexpr auto describe(const X*) {
  return pass("mlp_backward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, mlp_operands<X>(),
              tensor("grad_out", &X::grad_out, "B N"), gradient("dx", &X::d_x, "B M", Type::kPlanGradient),
              gradient("dw1", &X::d_w1, "K M", Type::kPlanGradient),
              gradient("dw2", &X::d_w2, "N K", Type::kPlanGradient),
              gradient("dbias1", &X::d_bias1, "K", Type::kAccumulation).where(&check_bias_gradient),
              scratch("scratch", &X::scratch), activation_of(&X::activation), workspace(&X::workspace));
}

// A part of an MLP (Plan::part): out = act(x w1^T + bias1), for the rows in x and the hidden units in w1 and bias1. The MLP's
// result is the product of out with w2.
struct MlpHidden {
  TensorView x, w1, bias1, out;
  TensorView row_planes, column_planes;  // x and w1 as planes of float16, if the plan's kernels read planes
  ActivationKind activation = ActivationKind::kIdentity;
};
template <std::same_as<MlpHidden> X>
constexpr auto describe(const X*) {
  return part<MlpForward>("mlp_hidden", kSm80 | kSm90 | kPlanes, tensor("x", &X::x, "B M"),
                          tensor("w1", &X::w1, "K M"), optional("bias1", &X::bias1, "K"),
                          result("out", &X::out, "B K").strided(), planes_of_operands<X>("B", "K", "M"),
                          activation_of(&X::activation));
}

// Such a part in the backward pass: hidden = act(z), and out, the derivative of the loss with respect to the pre-activations
// z. The MLP's gradients are matrix products of these two.
struct MlpLocalGradient {
  TensorView grad_out, x, w1, w2, bias1;  // columns of w2 are dense
  TensorView out, hidden;
  // out summed over groups of 16 rows. There is memory for the rows rounded up to a multiple of 256 and the units to one of 192.
  // The tiles of planes have 128 units and may reach further: what lies behind the memory is not stored (PartialSums).
  TensorView sums;
  // x, w1, grad_out and w2^T as planes of float16, in this order. Present only if the plan's kernels read planes.
  TensorView row_planes, column_planes, other_row_planes, other_column_planes;
  ActivationKind activation = ActivationKind::kIdentity;
};
template <std::same_as<MlpLocalGradient> X>
constexpr auto describe(const X*) {
  constexpr Axis kGroups{.name = "16 ceil(B / 256)", .of = "B", .follows = [](std::int64_t rows) {
                           return 16 * ((rows + 255) / 256);
                         }};
  constexpr Axis kUnits{.name = "192 ceil(K / 192)", .of = "K", .follows = [](std::int64_t units) {
                          return 192 * ((units + 191) / 192);
                        }};
  return part<MlpBackward>("mlp_local_gradient", kSm80 | kSm90 | kPlanes, mlp_operands<X>(),
                           tensor("grad_out", &X::grad_out, "B N"), result("out", &X::out, "B K").strided(),
                           result("hidden", &X::hidden, "B K").strided(),
                           result("sums", &X::sums, {kGroups, kUnits}, Type::kAccumulation).strided().maybe(),
                           planes_of_operands<X>("B", "K", "M"), planes_of_other_operands<X>("B", "K", "N"),
                           activation_of(&X::activation));
}

template <class Call>
[[gnu::always_inline]] inline FoldProblem mlp_problem(const Call& x, const TensorView& out_bias = {}) {
  return {.a = as_rows(x.x),
          .b = as_rows(x.w1),
          .payload = as_rows(transposed(x.w2)),
          .bias = as_column_bias(x.bias1, x.x.size[0]),
          .out_bias = out_bias,
          .score = {.bias_inside = true}};
}

// The pre-activations of hidden units, as scores that are not folded.
inline FoldProblem mlp_hidden_problem(const MlpHidden& x) {
  return with_planes(x, {.a = as_rows(x.x),
                         .b = as_rows(x.w1),
                         .bias = as_column_bias(x.bias1, x.x.size[0]),
                         .score = {.bias_inside = true}});
}

// The same with a second score, <grad_out, w2>: the derivative of the loss with respect to the hidden value.
inline FoldProblem mlp_gradient_problem(const MlpLocalGradient& x) {
  FoldProblem p = with_planes(x, {.a = as_rows(x.x),
                                  .b = as_rows(x.w1),
                                  .other_a = as_rows(x.grad_out),
                                  .other_b = as_rows(transposed(x.w2)),
                                  .bias = as_column_bias(x.bias1, x.x.size[0]),
                                  .score = {.bias_inside = true}});
  if (p.other_b_planes.halves.present()) p.other_b.stride[3] = 1;  // lines of planes are rows of w2^T
  return p;
}

}  // namespace monoidreduce
