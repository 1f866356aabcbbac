// The CPU engine is compiled once per instruction set. One of these is chosen at run time.
#pragma once

#include "monoidreduce/operators.h"

namespace monoidreduce::cpu {

template <class Call>
using EntryPoint = void (*)(const Call& x, const Launch& launch);

// The operators, compiled for one instruction set.
struct Engine {
  const char* isa;
  EntryPoint<AttentionForward> attention_forward;
  EntryPoint<AttentionBackward> attention_backward;
  EntryPoint<ModifiedAttentionForward> modified_attention_forward;
  EntryPoint<ModifiedAttentionBackward> modified_attention_backward;
  EntryPoint<CrossEntropyForward> cross_entropy_forward;
  EntryPoint<CrossEntropyBackward> cross_entropy_backward;
  EntryPoint<DistillationForward> distillation_forward;
  EntryPoint<DistillationBackward> distillation_backward;
  EntryPoint<LossReduction> reduce_losses;
  EntryPoint<MlpForward> mlp_forward;
  EntryPoint<MlpBackward> mlp_backward;
  EntryPoint<GatedHidden> gated_hidden;
  EntryPoint<GatedGradient> gated_gradient;
  EntryPoint<LogSumExpForward> logsumexp_forward;
  EntryPoint<LogSumExpBackward> logsumexp_backward;
  EntryPoint<LogProbsForward> log_probs_forward;
  EntryPoint<LogProbsBackward> log_probs_backward;
  EntryPoint<StatisticsForward> statistics_forward;
  EntryPoint<StatisticsBackward> statistics_backward;
  CpuTiles (*fold_tiles)(const FoldProblem& problem, bool bias_gradient, int threads);
};

// The engine for tensors of this dtype.
const Engine& engine_for(DType dtype);

// The same for all instruction sets. sequence_spans throws where starts are not sound.
void sequence_spans(const SequenceSpans& x);
void combine_logsumexp(const CombinedLogSumExp& x);
void combine_cross_entropy(const CombinedCrossEntropy& x);
void combine_log_probs(const CombinedLogProbs& x);
void combine_distillation(const CombinedDistillation& x);

}  // namespace monoidreduce::cpu
