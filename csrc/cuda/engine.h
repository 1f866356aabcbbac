// The entry points of the CUDA engine, by family of kernels. operators.h says what each does.
#pragma once

#include "monoidreduce/operators.h"

namespace monoidreduce::cuda {

namespace simt {
void attention_forward(const AttentionForward& x, const Plan& plan, const Launch& launch);
void attention_backward(const AttentionBackward& x, const Plan& plan, const Launch& launch);
void cross_entropy_forward(const CrossEntropyForward& x, const Plan& plan, const Launch& launch);
void cross_entropy_backward(const CrossEntropyBackward& x, const Plan& plan, const Launch& launch);
void distillation_forward(const DistillationForward& x, const Plan& plan, const Launch& launch);
void distillation_backward(const DistillationBackward& x, const Plan& plan, const Launch& launch);
void mlp_forward(const MlpForward& x, const Plan& plan, const Launch& launch);
void mlp_backward(const MlpBackward& x, const Plan& plan, const Launch& launch);
void logsumexp_forward(const LogSumExpForward& x, const Plan& plan, const Launch& launch);
void logsumexp_backward(const LogSumExpBackward& x, const Plan& plan, const Launch& launch);
void log_probs_forward(const LogProbsForward& x, const Plan& plan, const Launch& launch);
void log_probs_backward(const LogProbsBackward& x, const Plan& plan, const Launch& launch);
void modified_attention_fold(const ModifiedAttentionFold& x, const Plan& plan, const Launch& launch);
void modified_attention_pull(const ModifiedAttentionPull& x, const Plan& plan, const Launch& launch);
void statistics_fold(const StatisticsFold& x, const Plan& plan, const Launch& launch);
void statistics_local_gradient(const StatisticsLocalGradient& x, const Plan& plan, const Launch& launch);
void statistics_row_gradient(const StatisticsRowGradient& x, const Plan& plan, const Launch& launch);
}  // namespace simt

namespace sm80 {
void mlp_few_rows(const MlpForward& x, const Packing& packing, const Launch& launch);
void attention_forward(const AttentionForward& x, const Plan& plan, const Launch& launch);
void attention_backward(const AttentionBackward& x, const Plan& plan, const Launch& launch);
void cross_entropy_forward(const CrossEntropyForward& x, const Plan& plan, const Launch& launch);
void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Plan& plan, const Launch& launch);
void distillation_forward(const DistillationForward& x, const Plan& plan, const Launch& launch);
void distillation_local_gradient(const DistillationLocalGradient& x, const Plan& plan, const Launch& launch);
void mlp_forward(const MlpForward& x, const Plan& plan, const Launch& launch);
void mlp_backward(const MlpBackward& x, const Plan& plan, const Launch& launch);
void mlp_hidden(const MlpHidden& x, const Plan& plan, const Launch& launch);
void mlp_local_gradient(const MlpLocalGradient& x, const Plan& plan, const Launch& launch);
void logsumexp_forward(const LogSumExpForward& x, const Plan& plan, const Launch& launch);
void logsumexp_mean(const LogSumExpForward& x, const Launch& launch);
void logsumexp_backward(const LogSumExpBackward& x, const Plan& plan, const Launch& launch);
void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Plan& plan, const Launch& launch);
void log_probs_forward(const LogProbsForward& x, const Plan& plan, const Launch& launch);
void log_probs_local_gradient(const LogProbsLocalGradient& x, const Plan& plan, const Launch& launch);
void modified_attention_fold(const ModifiedAttentionFold& x, const Plan& plan, const Launch& launch);
void modified_attention_pull(const ModifiedAttentionPull& x, const Plan& plan, const Launch& launch);
void statistics_fold(const StatisticsFold& x, const Plan& plan, const Launch& launch);
void statistics_local_gradient(const StatisticsLocalGradient& x, const Plan& plan, const Launch& launch);
}  // namespace sm80

namespace sm90 {
void attention_few_rows(const AttentionForward& x, const Packing& packing, const Launch& launch);
void mlp_few_rows(const MlpForward& x, const Packing& packing, const Launch& launch);
void attention_forward(const AttentionForward& x, const Plan& plan, const Launch& launch);
void attention_backward(const AttentionBackward& x, const Plan& plan, const Launch& launch);
void cross_entropy_forward(const CrossEntropyForward& x, const Plan& plan, const Launch& launch);
void cross_entropy_kept_gradients(const CrossEntropyKeptGradients& x, const Plan& plan, const Launch& launch);
void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Plan& plan, const Launch& launch);
void distillation_forward(const DistillationForward& x, const Plan& plan, const Launch& launch);
void distillation_kept_gradients(const DistillationKeptGradients& x, const Plan& plan, const Launch& launch);
void distillation_local_gradient(const DistillationLocalGradient& x, const Plan& plan, const Launch& launch);
void mlp_forward(const MlpForward& x, const Plan& plan, const Launch& launch);
void mlp_backward(const MlpBackward& x, const Plan& plan, const Launch& launch);
void mlp_hidden(const MlpHidden& x, const Plan& plan, const Launch& launch);
void mlp_local_gradient(const MlpLocalGradient& x, const Plan& plan, const Launch& launch);
void logsumexp_forward(const LogSumExpForward& x, const Plan& plan, const Launch& launch);
void logsumexp_mean(const LogSumExpForward& x, const Launch& launch);
void logsumexp_backward(const LogSumExpBackward& x, const Plan& plan, const Launch& launch);
void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Plan& plan, const Launch& launch);
void log_probs_forward(const LogProbsForward& x, const Plan& plan, const Launch& launch);
void log_probs_local_gradient(const LogProbsLocalGradient& x, const Plan& plan, const Launch& launch);
void rows_product(const RowsProduct& x, const Launch& launch);
void columns_product(const ColumnsProduct& x, const Launch& launch);
void score_product(const ScoreProduct& x, const Launch& launch);
void jsd_rows(const JsdRows& x, const Launch& launch);
void jsd_gradient(const JsdGradient& x, const Launch& launch);
void modified_attention_fold(const ModifiedAttentionFold& x, const Plan& plan, const Launch& launch);
void modified_attention_pull(const ModifiedAttentionPull& x, const Plan& plan, const Launch& launch);
void statistics_fold(const StatisticsFold& x, const Plan& plan, const Launch& launch);
void statistics_local_gradient(const StatisticsLocalGradient& x, const Plan& plan, const Launch& launch);
}  // namespace sm90

// Of all GPUs.
void reduce_losses(const LossReduction& x, const Launch& launch);
void scale_rows(const RowScaling& x, const Launch& launch);
void copy_fitted(const FittedCopy& x, const Launch& launch);
void order_rows(const RowOrdering& x, const Launch& launch);
void sequence_spans(const SequenceSpans& x, const Launch& launch);
void combine_logsumexp(const CombinedLogSumExp& x, const Launch& launch);
void combine_cross_entropy(const CombinedCrossEntropy& x, const Launch& launch);
void combine_log_probs(const CombinedLogProbs& x, const Launch& launch);
void combine_distillation(const CombinedDistillation& x, const Launch& launch);
void undefine(const Undefined& x, const Launch& launch);
void gated_hidden(const GatedHidden& x, const Launch& launch);
void gated_gradient(const GatedGradient& x, const Launch& launch);

}  // namespace monoidreduce::cuda
