// The two-layer MLP on Hopper's tensor cores: the kernels behind ../mlp_*.cu.
#pragma once

#include "monoidreduce/operators.h"

namespace monoidreduce::cuda::sm90 {

void mlp_forward(const MlpForward& arguments, const Launch& launch);
void mlp_backward(const MlpBackward& arguments, const Launch& launch);

}  // namespace monoidreduce::cuda::sm90
