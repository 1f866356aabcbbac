// Calls run(T{}, Activation{}) for the accumulation type of dtype and the activation that kind names.
#pragma once

#include "monoidreduce/activation.h"
#include "operator.h"

namespace monoidreduce::cuda {

template <class Run>
void with_activation(DType dtype, ActivationKind kind, Run run) {
  with_accumulation(dtype, [&](auto zero) {
    using enum ActivationKind;
    switch (kind) {
      case kRelu:
        return run(zero, Relu{});
      case kRelu2:
        return run(zero, Relu2{});
      case kGelu:
        return run(zero, Gelu{});
      case kGeluTanh:
        return run(zero, GeluTanh{});
      case kSilu:
        return run(zero, Silu{});
      case kTanh:
        return run(zero, Tanh{});
      case kSigmoid:
        return run(zero, Sigmoid{});
      case kIdentity:
        return run(zero, Identity{});
    }
  });
}

}  // namespace monoidreduce::cuda
