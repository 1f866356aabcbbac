// Activations: one struct each, with the value and its derivative. ActivationKind selects one at run time.
#pragma once

#include "monoidreduce/math.h"

namespace monoidreduce {

struct Identity {
  template <class R>
  MR_HD static R value(R z) {
    return z;
  }
  template <class R>
  MR_HD static R derivative(R) {
    return R(1);
  }
};

struct Relu {
  template <class R>
  MR_HD static R value(R z) {
    return select(z < R(0), R(0), z);  // not z > 0 ? z : 0, which would turn NaN into 0
  }
  template <class R>
  MR_HD static R derivative(R z) {
    return select(z <= R(0), R(0), R(1));  // 1 for NaN, as in torch
  }
};

struct Relu2 {
  template <class R>
  MR_HD static R value(R z) {
    const R r = Relu::value(z);
    return r * r;
  }
  template <class R>
  MR_HD static R derivative(R z) {
    return R(2) * Relu::value(z);
  }
};

struct Sigmoid {
  template <class R>
  MR_HD static R value(R z) {
    return sigmoid(z);
  }
  template <class R>
  MR_HD static R derivative(R z) {
    const R s = value(z);
    return s * (R(1) - s);
  }
};

struct Silu {
  template <class R>
  MR_HD static R value(R z) {
    return z * Sigmoid::value(z);
  }
  template <class R>
  MR_HD static R derivative(R z) {
    const R s = Sigmoid::value(z);
    return s + z * s * (R(1) - s);
  }
};

struct Tanh {
  template <class R>
  MR_HD static R value(R z) {
    return tanh(z);
  }
  template <class R>
  MR_HD static R derivative(R z) {
    const R t = tanh(z);
    return R(1) - t * t;
  }
};

// z times the cumulative distribution function of the standard normal distribution.
struct Gelu {
  static constexpr double kSqrtHalf = 0.70710678118654752440;
  static constexpr double kInvSqrt2Pi = 0.39894228040143267794;
  template <class R>
  MR_HD static R cdf(R z) {
    return Scalar<R>(0.5) * (R(1) + erf(z * Scalar<R>(kSqrtHalf)));
  }
  template <class R>
  MR_HD static R value(R z) {
    return z * cdf(z);
  }
  template <class R>
  MR_HD static R derivative(R z) {
    return cdf(z) + z * Scalar<R>(kInvSqrt2Pi) * exp(Scalar<R>(-0.5) * z * z);
  }
};

// The tanh form of GELU, written with one sigmoid:
//
//   0.5 z (1 + tanh(u)) = z sigmoid(2 u),   u = sqrt(2 / pi) (z + 0.044715 z^3)
//
// The tensor cores wait for this value. A forward pass with 16384 rows and as many hidden units was timed on an H100 at widths
// 64 and 128. With the cube computed in the order below, (c z) z, it takes 155 and 198 us. As c (z z), with as many
// instructions, it takes 169 and 207 us.
struct GeluTanh {
  static constexpr double kTwoSqrt2OverPi = 1.5957691216057307117;
  static constexpr double kCubic = 0.044715;
  template <class R>
  MR_HD static R value(R z) {
    return z * Sigmoid::value(z * (Scalar<R>(kTwoSqrt2OverPi) + Scalar<R>(kTwoSqrt2OverPi * kCubic) * z * z));
  }
  // Here the cube is c (z z), because the derivative uses z z too. (Otherwise the two take four more instructions: 631 us
  // instead of 577 for the backward pass at width 128.)
  template <class R>
  MR_HD static R gate(R z) {
    return Sigmoid::value(z * (Scalar<R>(kTwoSqrt2OverPi) + Scalar<R>(kTwoSqrt2OverPi * kCubic) * (z * z)));
  }
  template <class R>
  MR_HD static R value_beside_derivative(R z) {
    return z * gate(z);
  }
  template <class R>
  MR_HD static R derivative(R z) {
    const R s = gate(z);
    const R slope = Scalar<R>(kTwoSqrt2OverPi) + Scalar<R>(3 * kTwoSqrt2OverPi * kCubic) * (z * z);
    const R bell = s - s * s;  // 0 where the slope may overflow
    return s + bell * select(bell == R(0), R(0), z * slope);
  }
};

enum class ActivationKind : int { kRelu, kRelu2, kGelu, kGeluTanh, kSilu, kTanh, kSigmoid, kIdentity };
inline constexpr const char* kActivationNames[] = {"relu", "relu2", "gelu",    "gelu_tanh",
                                                   "silu", "tanh",  "sigmoid", "identity"};

// Calls run(Activation{}) with the activation that kind selects. (A switch would become a jump table, which takes
// registers: 264 bytes of spills in Hopper's backward pass at width 64.)
template <class Run>
MR_HD void with_activation(ActivationKind kind, Run&& run) {
  using enum ActivationKind;
  if (kind == kRelu) return run(Relu{});
  if (kind == kRelu2) return run(Relu2{});
  if (kind == kGelu) return run(Gelu{});
  if (kind == kGeluTanh) return run(GeluTanh{});
  if (kind == kSilu) return run(Silu{});
  if (kind == kTanh) return run(Tanh{});
  if (kind == kSigmoid) return run(Sigmoid{});
  run(Identity{});
}

// The activation's value, for callers that also compute its derivative.
template <class Activation, class R>
MR_HD R value_beside_derivative(R z) {
  if constexpr (requires { Activation::value_beside_derivative(z); }) {
    return Activation::value_beside_derivative(z);
  } else {
    return Activation::value(z);
  }
}

}  // namespace monoidreduce
