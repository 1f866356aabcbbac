// The host API: the library's operators on tensor views, on the CPU and on CUDA devices. It does not use torch; the
// caller allocates all tensors.
//
// How gradients are returned. A gradient whose tensor is absent is not computed.
//   CPU                   written, in the input's type
//   CUDA, SIMT            added to a zero-filled contiguous buffer of the accumulation type (float; double for float64)
//   CUDA, tensor cores    d_k, d_v, d_w1, d_w2: written, in the input's type
//                         d_q, d_x: the same where Plan::adds_rows is false, else as with SIMT
//                         all gradients must be present
//   of a bias, anywhere   added to a buffer of the accumulation type
//   of sinks, anywhere    written, in the accumulation type
//
// A log-sum-exp is stored in two words, lse and lse_low (LogNumber). Forward writes both, backward reads both.
#pragma once

#include <string>
#include <vector>

#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/ops/attention.h"
#include "monoidreduce/ops/cross_entropy.h"
#include "monoidreduce/ops/distillation.h"
#include "monoidreduce/ops/gated_mlp.h"
#include "monoidreduce/ops/log_probs.h"
#include "monoidreduce/ops/logsumexp.h"
#include "monoidreduce/ops/mlp.h"
#include "monoidreduce/ops/modified_attention.h"
#include "monoidreduce/ops/ranks.h"
#include "monoidreduce/ops/rows.h"
#include "monoidreduce/ops/sequences.h"
#include "monoidreduce/ops/statistics.h"
#include "monoidreduce/ops/stored_scores.h"
#include "monoidreduce/plan.h"

namespace monoidreduce {

// The plan of a call on a GPU, which is or is not there. The caller asks before the call, because it
// allocates what the plan says; results, gradients and scratch may still be absent then. The plan is of
// padded operands. On tensor cores (Plan::can) the caller pads sizes that are not a multiple of 8 with zeros.
// These sizes are operand widths and, in an MLP, the hidden units.
Plan plan(const AttentionForward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const AttentionBackward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const CrossEntropyForward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const CrossEntropyBackward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const DistillationForward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const DistillationBackward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const MlpForward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const MlpBackward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const LogSumExpForward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const LogSumExpBackward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const LogProbsForward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const LogProbsBackward& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const ModifiedAttentionFold& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const ModifiedAttentionPull& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const StatisticsFold& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const StatisticsLocalGradient& x, const DeviceFacts& gpu, const Launch& launch);
Plan plan(const StatisticsRowGradient& x, const DeviceFacts& gpu, const Launch& launch);
// What a GPU that is there has. Throws where the build is CPU-only.
const DeviceFacts& facts_of(int cuda_device);

// Whether the forward pass of a loss can store local gradients (dlogits) for the backward pass. Valid for 16-bit tensors of these
// widths with less than 2^30 rows and columns. other_width is 0 where there is one pair of operands.
bool can_keep(std::int64_t width, std::int64_t other_width, double scale, const DeviceFacts& gpu);

// Whether a logsumexp_matmul of 16 bits and this width is narrow (Plan::narrow). This holds for rows and
// columns that are both at most kNarrowLines.few, or both at least kNarrowLines.many.
struct LineNumbers {
  std::int64_t few, many;
};
extern const LineNumbers kNarrowLines;
bool can_be_narrow(std::int64_t width, double scale, const DeviceFacts& gpu);

// In how many groups Hopper's contraction takes the rows of a 16-bit product: each group reads all columns again.
std::int64_t contraction_groups(std::int64_t rows, std::int64_t columns, std::int64_t width,
                                const DeviceFacts& gpu);

// Each operator checks its arguments (describe.h), then calls the engine of its tensors' device. An engine's own entry
// points check nothing. plan: of this call, whose deterministic and tf32 count then; null: it is made here, for a call that needs no
// workspace. Not read on the CPU.
void attention_forward(const AttentionForward& x, const Launch& launch, const Plan* plan = nullptr);
void attention_backward(const AttentionBackward& x, const Launch& launch, const Plan* plan = nullptr);
void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch, const Plan* plan = nullptr);
void cross_entropy_backward(const CrossEntropyBackward& x, const Launch& launch, const Plan* plan = nullptr);
void distillation_forward(const DistillationForward& x, const Launch& launch, const Plan* plan = nullptr);
void distillation_backward(const DistillationBackward& x, const Launch& launch, const Plan* plan = nullptr);
void mlp_forward(const MlpForward& x, const Launch& launch, const Plan* plan = nullptr);
void mlp_backward(const MlpBackward& x, const Launch& launch, const Plan* plan = nullptr);
void logsumexp_forward(const LogSumExpForward& x, const Launch& launch, const Plan* plan = nullptr);
void logsumexp_backward(const LogSumExpBackward& x, const Launch& launch, const Plan* plan = nullptr);
void log_probs_forward(const LogProbsForward& x, const Launch& launch, const Plan* plan = nullptr);
void log_probs_backward(const LogProbsBackward& x, const Launch& launch, const Plan* plan = nullptr);
void reduce_losses(const LossReduction& x, const Launch& launch);
void modified_attention_forward(const ModifiedAttentionForward& x, const Launch& launch);
void modified_attention_fold(const ModifiedAttentionFold& x, const Launch& launch, const Plan* plan);
void modified_attention_pull(const ModifiedAttentionPull& x, const Launch& launch, const Plan* plan);
void modified_attention_backward(const ModifiedAttentionBackward& x, const Launch& launch);
void statistics_forward(const StatisticsForward& x, const Launch& launch);
void statistics_backward(const StatisticsBackward& x, const Launch& launch);
void statistics_fold(const StatisticsFold& x, const Launch& launch, const Plan* plan);

// Local gradients of the weights that a forward pass kept. plan: of that pass.
void cross_entropy_kept_gradients(const CrossEntropyKeptGradients& x, const Launch& launch, const Plan* plan);
void distillation_kept_gradients(const DistillationKeptGradients& x, const Launch& launch, const Plan* plan);

// On tensor cores the caller computes the gradients of a loss as matrix products of local gradients
// (dlogits). It takes a slice of the classes at a time. plan: of the backward pass.
void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Launch& launch, const Plan* plan);
void distillation_local_gradient(const DistillationLocalGradient& x, const Launch& launch, const Plan* plan);
void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Launch& launch, const Plan* plan);
void log_probs_local_gradient(const LogProbsLocalGradient& x, const Launch& launch, const Plan* plan);
void statistics_local_gradient(const StatisticsLocalGradient& x, const Launch& launch, const Plan* plan);
void statistics_row_gradient(const StatisticsRowGradient& x, const Launch& launch, const Plan* plan);
// Kernels that were compiled while the process runs: machine code, and the names of some. Returns the number of the first.
std::int64_t load_kernels(const std::string& image, const std::vector<std::string>& names);
// Gathers, multiplies or scatters rows for the products with local gradients.
void scale_rows(const RowScaling& x, const Launch& launch);
// Pads or cuts a tensor for the tensor cores.
void copy_fitted(const FittedCopy& x, const Launch& launch);
// Finds the active rows, for kernels that skip the others.
void order_rows(const RowOrdering& x, const Launch& launch);
void sequence_spans(const SequenceSpans& x, const Launch& launch);
// Combines what the forward passes of several ranks left of their own columns.
void combine_logsumexp(const CombinedLogSumExp& x, const Launch& launch);
void combine_cross_entropy(const CombinedCrossEntropy& x, const Launch& launch);
void combine_log_probs(const CombinedLogProbs& x, const Launch& launch);
void combine_distillation(const CombinedDistillation& x, const Launch& launch);
void undefine(const Undefined& x, const Launch& launch);
// Matrix products of local gradients, only on GPUs whose kernels multiply (Capabilities).
void rows_product(const RowsProduct& x, const Launch& launch);
void columns_product(const ColumnsProduct& x, const Launch& launch);
// Distillation with the loss "jsd", of stored scores: these as matrix products, on the same GPUs, and what is between products.
void score_product(const ScoreProduct& x, const Launch& launch);
void jsd_rows(const JsdRows& x, const Launch& launch);
void jsd_gradient(const JsdGradient& x, const Launch& launch);
// An MLP too wide for one kernel is computed in parts of Plan::part rows and hidden units, whose products the
// caller takes. So is the backward pass of an MLP with few hidden units. A part has all rows, or all hidden
// units. plan: of the pass.
void mlp_hidden(const MlpHidden& x, const Launch& launch, const Plan* plan);
void mlp_local_gradient(const MlpLocalGradient& x, const Launch& launch, const Plan* plan);
// A gated MLP is always computed in parts, whose products the caller takes, on the CPU and on every GPU.
void gated_hidden(const GatedHidden& x, const Launch& launch);
void gated_gradient(const GatedGradient& x, const Launch& launch);

// The instruction set that the CPU engine uses: "baseline", "avx2", "avx512" or "avx512bf16". It is the best that both
// this build and this processor have, unless the environment variable MONOIDREDUCE_CPU_ISA names another. The choice is
// made once, at the first call.
const char* cpu_isa();
const char* cpu_isa(DType dtype);     // the one used for this dtype: avx512bf16 has code for bfloat16 alone
std::vector<std::string> cpu_isas();  // the values that MONOIDREDUCE_CPU_ISA may have here, worst first

// The tiles of the CPU engine. Forward: a panel of rows by a tile of columns. Backward: a chunk of rows by a block of
// columns.
struct CpuTiles {
  TileSize forward, backward;
};
CpuTiles cpu_tiles(const FoldProblem& problem, bool bias_gradient, int threads);

}  // namespace monoidreduce
