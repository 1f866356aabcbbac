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

// Every call of the library, in the order of the Python module's functions.
template <class... Each>
struct CallList {};
using Calls = CallList<
    AttentionForward, AttentionBackward, CrossEntropyForward, CrossEntropyBackward, CrossEntropyKeptGradients,
    CrossEntropyLocalGradient, DistillationForward, DistillationBackward, DistillationKeptGradients,
    DistillationLocalGradient, MlpForward, MlpBackward, MlpHidden, MlpLocalGradient, GatedHidden,
    GatedGradient, LogSumExpForward, LogSumExpBackward, LogSumExpLocalGradient, LogProbsForward,
    LogProbsBackward, LogProbsLocalGradient, ModifiedAttentionForward, ModifiedAttentionBackward,
    ModifiedAttentionFold, ModifiedAttentionPull, StatisticsForward, StatisticsBackward, StatisticsFold,
    StatisticsLocalGradient, StatisticsRowGradient, LossReduction, RowScaling, FittedCopy, RowOrdering,
    SequenceSpans, CombinedLogSumExp, CombinedCrossEntropy, CombinedLogProbs, CombinedDistillation, Undefined,
    RowsProduct, ColumnsProduct, ScoreProduct, JsdRows, JsdGradient>;

// The plan of a call on a GPU, which is or is not there. The caller asks before the call, because it
// allocates what the plan says; results, gradients and scratch may still be absent then. The plan is of
// padded operands. On tensor cores (Plan::can) the caller pads sizes that are not a multiple of 8 with zeros.
// These sizes are operand widths and, in an MLP, the hidden units. Only of passes with kernels of kSimt (describe.h).
template <class Call>
Plan plan(const Call& x, const DeviceFacts& gpu, const Launch& launch);
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

// Checks a call (describe.h), then runs it by the kernels for its tensors' device. The kernels' own run() checks nothing.
// plan: of this call or of the pass that it is a part of; its deterministic and tf32 count then. Null, for a pass with kernels
// of kCpu too: it is made here, for a call that needs no workspace. Not read on the CPU, nor by a call that has none.
//
// On tensor cores the caller computes the gradients of a loss as matrix products of local gradients (dlogits), a slice of
// the classes at a time. An MLP too wide for one kernel is computed in parts of Plan::part rows and hidden units, whose
// products the caller takes. So is the backward pass of an MLP with few hidden units. A part has all rows, or all
// hidden units. A gated MLP is always computed in parts, on the CPU and on every GPU.
template <class Call>
void run(const Call& x, const Launch& launch, const Plan* plan = nullptr);

// Kernels that were compiled while the process runs: machine code, and the names of some. Returns the number of the first.
std::int64_t load_kernels(const std::string& image, const std::vector<std::string>& names);

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
