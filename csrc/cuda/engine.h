// The entry points of the CUDA engine. operators.h says what each does.
#pragma once

#include "monoidreduce/operators.h"

namespace monoidreduce::cuda {

void attention_forward(const AttentionForward& x, const Launch& launch);
void attention_backward(const AttentionBackward& x, const Launch& launch);
void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch);
void cross_entropy_backward(const CrossEntropyBackward& x, const Launch& launch);
void distillation_forward(const DistillationForward& x, const Launch& launch);
void distillation_backward(const DistillationBackward& x, const Launch& launch);
void reduce_losses(const LossReduction& x, const Launch& launch);
void mlp_forward(const MlpForward& x, const Launch& launch);
void mlp_backward(const MlpBackward& x, const Launch& launch);
void logsumexp_forward(const LogSumExpForward& x, const Launch& launch);
void logsumexp_backward(const LogSumExpBackward& x, const Launch& launch);
void statistics_forward(const StatisticsForward& x, const Launch& launch);
void statistics_backward(const StatisticsBackward& x, const Launch& launch);

Tier attention_forward_tier(const AttentionForward& x, const Launch& launch);
Tier attention_backward_tier(const AttentionBackward& x, const Launch& launch);
Tier mlp_forward_tier(const MlpForward& x, const Launch& launch);
Tier mlp_backward_tier(const MlpBackward& x, const Launch& launch);
Tier cross_entropy_forward_tier(const CrossEntropyForward& x, const Launch& launch);
Tier cross_entropy_backward_tier(const CrossEntropyBackward& x, const Launch& launch);
Tier distillation_forward_tier(const DistillationForward& x, const Launch& launch);
Tier distillation_backward_tier(const DistillationBackward& x, const Launch& launch);
Tier logsumexp_forward_tier(const LogSumExpForward& x, const Launch& launch);
Tier logsumexp_backward_tier(const LogSumExpBackward& x, const Launch& launch);
bool can_keep(int cuda_device, std::int64_t width, std::int64_t other_width, double scale,
              const Launch& launch);

void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Launch& launch);
void distillation_local_gradient(const DistillationLocalGradient& x, const Launch& launch);
void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Launch& launch);
void scale_rows(const RowScaling& x, const Launch& launch);
void order_rows(const RowOrdering& x, const Launch& launch);
void rows_product(const RowsProduct& x, const Launch& launch);
void columns_product(const ColumnsProduct& x, const Launch& launch);
void mlp_hidden(const MlpHidden& x, const Launch& launch);
void mlp_local_gradient(const MlpLocalGradient& x, const Launch& launch);

}  // namespace monoidreduce::cuda
