// What distillation's CUDA files share: the loss as a type.
#pragma once

#include <type_traits>

#include "monoidreduce/monoids/distillation.h"

namespace monoidreduce::cuda {

// Calls run(loss), loss a compile-time constant.
template <class Run>
void with_loss(DistillationLoss loss, Run run) {
  using enum DistillationLoss;
  switch (loss) {
    case kCrossEntropy:
      return run(std::integral_constant<DistillationLoss, kCrossEntropy>{});
    case kForwardKL:
      return run(std::integral_constant<DistillationLoss, kForwardKL>{});
    case kReverseKL:
      return run(std::integral_constant<DistillationLoss, kReverseKL>{});
  }
}

}  // namespace monoidreduce::cuda
