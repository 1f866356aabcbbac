// The host API: the library's operators on tensor views, on the CPU and on CUDA devices. It does not use torch, and the
// caller allocates all tensors.
//
// How gradients are returned (a gradient whose tensor is absent is not computed):
//   CPU                   written, in the input's type
//   CUDA, SIMT            added to a zero-filled contiguous buffer of the accumulation type (float; double for float64)
//   CUDA, tensor cores    d_k, d_v, d_w1, d_w2: written, in the input's type
//                         d_q, d_x: the same if Plan::adds_rows is false, otherwise d_x as with SIMT, and d_q
//                         written to a contiguous buffer of the accumulation type
//                         all gradients that the plan computes must be present
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
#include "monoidreduce/ops/planes.h"
#include "monoidreduce/ops/ranks.h"
#include "monoidreduce/ops/rows.h"
#include "monoidreduce/ops/sequences.h"
#include "monoidreduce/ops/statistics.h"
#include "monoidreduce/ops/stored_scores.h"
#include "monoidreduce/ops/target_scores.h"
#include "monoidreduce/plan.h"

namespace monoidreduce {

// Every call of the library, in the order of the Python module's functions.
template <class... Each>
struct CallList {};
using Calls =
    CallList<AttentionForward, AttentionBackward, CrossEntropyForward, CrossEntropyBackward,
             CrossEntropyKeptGradients, CrossEntropyLocalGradient, DistillationForward, DistillationBackward,
             DistillationKeptGradients, DistillationLocalGradient, MlpForward, MlpBackward, MlpHidden,
             MlpLocalGradient, GatedHidden, GatedGradient, LogSumExpForward, LogSumExpBackward,
             LogSumExpLocalGradient, LogProbsForward, LogProbsBackward, LogProbsLocalGradient,
             ModifiedAttentionForward, ModifiedAttentionBackward, StatisticsForward, StatisticsBackward,
             StatisticsFold, StatisticsPayload, StatisticsLocalGradient, StatisticsRowGradient, LossReduction,
             RowScaling, FittedCopy, RowOrdering, RowClearing, SequenceSpans, CombinedLogSumExp,
             CombinedCrossEntropy, CombinedLogProbs, CombinedDistillation, Undefined, RowsProduct,
             ColumnsProduct, RowSplit, ColumnSplit, PlaneProduct, PlaneDots, ScoreProduct, JsdRows,
             JsdGradient, TargetScores, TargetDlogits>;

// The plan of a call on a GPU, which need not be present. The caller asks for it before the call, because the plan says what to
// allocate; results, gradients and scratch may still be absent then. On tensor cores (Plan::can) the plan is for padded
// operands: the caller pads operand widths, and the hidden units of an MLP, with zeros to multiples of 8. Only passes with
// SIMT kernels have plans (kSimt in describe.h).
template <class Call>
Plan plan(const Call& x, const DeviceFacts& gpu, const Launch& launch);
// The facts of a GPU that is present. Throws in a CPU-only build.
const DeviceFacts& facts_of(int cuda_device);

// Whether the forward pass of a loss can save dlogits (local gradients) for the backward pass. The answer holds for 16-bit
// tensors of these widths with less than 2^30 rows and columns. other_width is the teacher's, or 0 if there is none.
bool can_keep(std::int64_t width, std::int64_t other_width, double scale, const DeviceFacts& gpu);

// Whether a 16-bit logsumexp_matmul of this width is narrow (Plan::narrow). The answer holds if rows and columns are both at
// most kNarrowLines.few, or both at least kNarrowLines.many.
struct LineNumbers {
  std::int64_t few, many;
};
extern const LineNumbers kNarrowLines;
bool can_be_narrow(std::int64_t width, double scale, const DeviceFacts& gpu);

// Checks a call (describe.h), then runs the kernels for its tensors' device. The kernels' own run() checks nothing.
//
// plan is the plan of this call, or of the pass that it is a part of; its `deterministic` and `tf32` then replace those of
// `launch`. For a pass that also has CPU kernels it may be null: run() then makes the plan, for a call without a workspace.
// plan is not read on the CPU, nor by a call that has no plan.
//
// On tensor cores the caller computes the gradients of a loss as matrix products of dlogits, a slice of the classes at a time.
// An MLP too wide for one kernel runs in parts of Plan::part rows and hidden units, and the caller does the matrix products
// around them. So does the backward pass of an MLP with few hidden units. A part has all rows, or all hidden units. A gated
// MLP always runs in parts, on the CPU and on every GPU.
template <class Call>
void run(const Call& x, const Launch& launch, const Plan* plan = nullptr);

// Loads kernels that were compiled at run time. image: machine code; names: kernels in it. Returns the handle of the first
// kernel; those of the others follow it.
std::int64_t load_kernels(const std::string& image, const std::vector<std::string>& names);

// The instruction set that the CPU engine uses: "baseline", "avx2", "avx512" or "avx512bf16". It is the best that both
// this build and this processor have, unless the environment variable MONOIDREDUCE_CPU_ISA names another. The choice is
// made once, at the first call.
const char* cpu_isa();
const char* cpu_isa(DType dtype);     // the one used for this dtype: avx512bf16 has code for bfloat16 alone
std::vector<std::string> cpu_isas();  // the values that MONOIDREDUCE_CPU_ISA may have here, worst first

// The tile sizes of the CPU engine. Forward: a panel of rows by a tile of columns. Backward: a chunk of rows by a block
// of columns.
struct CpuTiles {
  TileSize forward, backward;
};
CpuTiles cpu_tiles(const FoldProblem& problem, bool bias_gradient, int threads);

}  // namespace monoidreduce
