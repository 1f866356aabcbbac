// Linear cross entropy, linear distillation and logsumexp_matmul on tensor cores: the kernels behind cross_entropy.cu,
// distillation.cu and logsumexp.cu.
#pragma once

#include "monoidreduce/operators.h"

namespace monoidreduce::cuda {

// The scratch that a forward pass needs is in floats.
namespace sm80 {
void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch);
void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Launch& launch);
void distillation_forward(const DistillationForward& x, const Launch& launch);
void distillation_local_gradient(const DistillationLocalGradient& x, const Launch& launch);
void logsumexp_forward(const LogSumExpForward& x, const Launch& launch);
void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Launch& launch);
std::int64_t cross_entropy_forward_scratch(const CrossEntropyForward& x);
std::int64_t distillation_forward_scratch(const DistillationForward& x);
std::int64_t logsumexp_forward_scratch(const LogSumExpForward& x);
}  // namespace sm80

namespace sm90 {
void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch);
void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Launch& launch);
void distillation_forward(const DistillationForward& x, const Launch& launch);
void distillation_local_gradient(const DistillationLocalGradient& x, const Launch& launch);
void logsumexp_forward(const LogSumExpForward& x, const Launch& launch);
void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Launch& launch);
std::int64_t cross_entropy_forward_scratch(const CrossEntropyForward& x);
std::int64_t distillation_forward_scratch(const DistillationForward& x);
std::int64_t logsumexp_forward_scratch(const LogSumExpForward& x);
void rows_product(const RowsProduct& x, const Launch& launch);
void columns_product(const ColumnsProduct& x, const Launch& launch);
}  // namespace sm90

}  // namespace monoidreduce::cuda
