// The gated MLP: (act(x gate^T + gate_bias) * (x w1^T + bias1)) w2^T + bias2, as SwiGLU and GeGLU. The caller takes the
// matrix products, of some rows and hidden units at a time; what is between them is here, in place.
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
  // Becomes the derivatives with respect to gate and up, g being that with respect to the hidden value, which is returned.
  MR_HD R pull(R g) {
    const R value = value_beside_derivative<Activation>(gate), by_up = g * value, h = value * up;
    gate = g * up * Activation::derivative(gate), up = by_up;
    return h;
  }
};

// The CPU has hidden values in the accumulation type.
template <class Call>
void check_hidden_type(const Call& x) {
  require(x.gate.is_cuda() || x.gate.dtype == accumulation(x.gate.dtype),
          "gate: expected float32 or float64 on the CPU, got ", name(x.gate.dtype));
}

// Of hidden units in dense memory, which on CUDA is 16-byte aligned: up becomes the hidden values.
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

// The same in the backward pass. hidden is the derivative of the loss with respect to the hidden values, and
// becomes the hidden values. gate and up become the derivatives with respect to themselves.
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
