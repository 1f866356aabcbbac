// The gated MLP, such as SwiGLU and GeGLU: (act(x gate^T + gate_bias) * (x w1^T + bias1)) w2^T + bias2. The caller does the
// matrix products, for some rows and hidden units at a time. The elementwise work between them is here, in place.
#pragma once

#include "monoidreduce/activation.h"
#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/ops/mlp.h"

namespace monoidreduce {

// A hidden unit: act(gate) * up.
template <class Activation, class R>
struct GatedUnit {
  R gate, up;

  MR_HD R hidden() const { return Activation::value(gate) * up; }
  // g: the derivative of the loss with respect to the hidden value. Replaces gate and up by the derivatives with respect to
  // them, and returns the hidden value.
  MR_HD R pull(R g) {
    const R value = value_beside_derivative<Activation>(gate), by_up = g * value, h = value * up;
    gate = g * up * Activation::derivative(gate), up = by_up;
    return h;
  }
};

// On the CPU hidden values are in the accumulation type.
template <class Call>
void check_hidden_type(const Call& x) {
  require(x.gate.is_cuda() || x.gate.dtype == accumulation(x.gate.dtype),
          "gate: expected float32 or float64 on the CPU, got ", name(x.gate.dtype));
}

// Forward, in place: up becomes the hidden values act(gate) * up. Memory is dense; on CUDA it is 16-byte aligned.
struct GatedHidden {
  TensorView gate, up;
  ActivationKind activation = ActivationKind::kIdentity;
};
template <std::same_as<GatedHidden> X>
constexpr auto describe(const X*) {
  return part<MlpForward>("gated_hidden", kCpu | kGpus,
                          tensor("gate", &X::gate, "B K").dense().where(&check_hidden_type<X>),
                          result("up", &X::up, "B K"), activation_of(&X::activation));
}

// Backward, in place. hidden is the derivative of the loss with respect to the hidden values, and becomes the hidden values.
// gate and up become the derivatives with respect to gate and up.
struct GatedGradient {
  TensorView gate, up, hidden;
  ActivationKind activation = ActivationKind::kIdentity;
};
template <std::same_as<GatedGradient> X>
constexpr auto describe(const X*) {
  return part<MlpBackward>(
      "gated_gradient", kCpu | kGpus, result("gate", &X::gate, "B K").where(&check_hidden_type<X>),
      result("up", &X::up, "B K"), result("hidden", &X::hidden, "B K"), activation_of(&X::activation));
}

}  // namespace monoidreduce
