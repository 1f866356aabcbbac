// Linear cross entropy, linear distillation and logsumexp_matmul on tensor cores: the kernels behind cross_entropy.cu,
// distillation.cu and logsumexp.cu.
#pragma once

#include "monoidreduce/operators.h"

namespace monoidreduce::cuda {

// The scratch that a forward pass needs is in floats.
#define MONOIDREDUCE_DECLARE_TIER                                                                      \
  void cross_entropy_forward(const CrossEntropyForward& arguments, const Launch& launch);              \
  void cross_entropy_local_gradient(const CrossEntropyLocalGradient& arguments, const Launch& launch); \
  void distillation_forward(const DistillationForward& arguments, const Launch& launch);               \
  void distillation_local_gradient(const DistillationLocalGradient& arguments, const Launch& launch);  \
  void logsumexp_forward(const LogSumExpForward& arguments, const Launch& launch);                     \
  void logsumexp_local_gradient(const LogSumExpLocalGradient& arguments, const Launch& launch);        \
  std::int64_t cross_entropy_forward_scratch(const CrossEntropyForward& arguments);                    \
  std::int64_t distillation_forward_scratch(const DistillationForward& arguments);                     \
  std::int64_t logsumexp_forward_scratch(const LogSumExpForward& arguments);
namespace sm80 {
MONOIDREDUCE_DECLARE_TIER
}
namespace sm90 {
MONOIDREDUCE_DECLARE_TIER
void rows_product(const RowsProduct& arguments, const Launch& launch);
void columns_product(const ColumnsProduct& arguments, const Launch& launch);
}  // namespace sm90
#undef MONOIDREDUCE_DECLARE_TIER

}  // namespace monoidreduce::cuda
