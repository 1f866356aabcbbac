// The tensor-core tiers of attention and the MLP: the kernels behind attention.cu and mlp_*.cu.
#pragma once

#include "monoidreduce/operators.h"

namespace monoidreduce::cuda {

#define MONOIDREDUCE_DECLARE_TIER                                                    \
  void attention_forward(const AttentionForward& arguments, const Launch& launch);   \
  void attention_backward(const AttentionBackward& arguments, const Launch& launch); \
  void mlp_forward(const MlpForward& arguments, const Launch& launch);               \
  void mlp_backward(const MlpBackward& arguments, const Launch& launch);
namespace sm80 {
MONOIDREDUCE_DECLARE_TIER
}
namespace sm90 {
MONOIDREDUCE_DECLARE_TIER
}
#undef MONOIDREDUCE_DECLARE_TIER

}  // namespace monoidreduce::cuda
