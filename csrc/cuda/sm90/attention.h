// Attention on Hopper's tensor cores: the kernels behind ../attention.cu.
#pragma once

#include "monoidreduce/operators.h"

namespace monoidreduce::cuda::sm90 {

void attention_forward(const AttentionForward& arguments, const Launch& launch);
void attention_backward(const AttentionBackward& arguments, const Launch& launch);
std::int64_t attention_backward_scratch(const AttentionBackward& arguments);  // floats

}  // namespace monoidreduce::cuda::sm90
