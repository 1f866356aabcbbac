// The engine of one instruction set.
#include "engine.h"

#include "monoidreduce/cpu/isa.h"

#define MR_TEXT_OF(name) #name
#define MR_TEXT(macro) MR_TEXT_OF(macro)

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

void attention_forward(const AttentionForward& x, const Launch& launch);
void attention_backward(const AttentionBackward& x, const Launch& launch);
void modified_attention_forward(const ModifiedAttentionForward& x, const Launch& launch);
void modified_attention_backward(const ModifiedAttentionBackward& x, const Launch& launch);
void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch);
void cross_entropy_backward(const CrossEntropyBackward& x, const Launch& launch);
void distillation_forward(const DistillationForward& x, const Launch& launch);
void distillation_backward(const DistillationBackward& x, const Launch& launch);
void reduce_losses(const LossReduction& x, const Launch& launch);
void mlp_forward(const MlpForward& x, const Launch& launch);
void mlp_backward(const MlpBackward& x, const Launch& launch);
void gated_hidden(const GatedHidden& x, const Launch& launch);
void gated_gradient(const GatedGradient& x, const Launch& launch);
void logsumexp_forward(const LogSumExpForward& x, const Launch& launch);
void logsumexp_backward(const LogSumExpBackward& x, const Launch& launch);
void log_probs_forward(const LogProbsForward& x, const Launch& launch);
void log_probs_backward(const LogProbsBackward& x, const Launch& launch);
void statistics_forward(const StatisticsForward& x, const Launch& launch);
void statistics_backward(const StatisticsBackward& x, const Launch& launch);
CpuTiles fold_tiles(const FoldProblem& problem, bool bias_gradient, int threads);

extern const Engine engine;
constinit const Engine engine{.isa = MR_TEXT(MR_CPU_ISA),
                              .attention_forward = &attention_forward,
                              .attention_backward = &attention_backward,
                              .modified_attention_forward = &modified_attention_forward,
                              .modified_attention_backward = &modified_attention_backward,
                              .cross_entropy_forward = &cross_entropy_forward,
                              .cross_entropy_backward = &cross_entropy_backward,
                              .distillation_forward = &distillation_forward,
                              .distillation_backward = &distillation_backward,
                              .reduce_losses = &reduce_losses,
                              .mlp_forward = &mlp_forward,
                              .mlp_backward = &mlp_backward,
                              .gated_hidden = &gated_hidden,
                              .gated_gradient = &gated_gradient,
                              .logsumexp_forward = &logsumexp_forward,
                              .logsumexp_backward = &logsumexp_backward,
                              .log_probs_forward = &log_probs_forward,
                              .log_probs_backward = &log_probs_backward,
                              .statistics_forward = &statistics_forward,
                              .statistics_backward = &statistics_backward,
                              .fold_tiles = &fold_tiles};

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
