// The host API: the library's operators on tensor views, on the CPU and on CUDA devices. It does not use torch; the
// caller allocates all tensors.
//
// How gradients are returned. A gradient whose tensor is absent is not computed.
//   CPU                   written, in the input's type
//   CUDA, SIMT            added to a zero-filled contiguous buffer of the accumulation type (float; double for float64)
//   CUDA, tensor cores    d_k, d_v, d_w1, d_w2: written, in the input's type
//                         d_q, d_x: the same where Tier::adds_rows is false, else as with SIMT
//                         all gradients must be present
//   of a bias, anywhere   added to a buffer of the accumulation type
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
#include "monoidreduce/ops/logsumexp.h"
#include "monoidreduce/ops/mlp.h"
#include "monoidreduce/ops/rows.h"
#include "monoidreduce/ops/statistics.h"

namespace monoidreduce {

// Each operator checks its arguments (describe.h), then calls the engine of its tensors' device. An engine's own entry
// points check nothing.
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

// The backend of a call and the reason for it: the instruction set on the CPU; "simt", "sm80" or "sm90" on CUDA. The
// caller asks before the backward pass, because it allocates the gradients; they may still be absent then.
//
// On "sm80" and "sm90" the caller pads sizes that are not a multiple of 8 with zeros: operand widths and, in an MLP, the
// hidden units. Scratch, parts and gradients belong to the padded call. Without padding, attention and the MLP run on
// "simt".
struct Tier {
  std::string name, reason;
  std::int64_t scratch = 0;  // elements of the accumulation type that the call needs
  bool adds_rows = true;     // d_q, d_x: added to; false: written in the inputs' type
  TileSize part{};           // mlp: the rows and hidden units of one part (MlpHidden); or none
};
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

// Whether the forward pass of a loss can store local gradients (dlogits) for the backward pass: only on the tier "sm90".
// Valid for 16-bit tensors of these widths with less than 2^30 rows and columns. other_width is 0 where there is one
// pair of operands.
bool can_keep(int cuda_device, std::int64_t width, std::int64_t other_width, double scale,
              const Launch& launch);

// On the tensor-core tiers the caller computes the gradients of a loss as matrix products of local gradients (dlogits).
// It asks for a slice of scratch / N classes at a time, rounded up. scratch is the backward tier's, in elements of the
// type of x.
void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Launch& launch);
void distillation_local_gradient(const DistillationLocalGradient& x, const Launch& launch);
void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Launch& launch);
// Gathers, multiplies or scatters rows for the products with local gradients.
void scale_rows(const RowScaling& x, const Launch& launch);
// Finds the active rows, for kernels that skip the others.
void order_rows(const RowOrdering& x, const Launch& launch);
// Matrix products of local gradients, only on the tier "sm90".
void rows_product(const RowsProduct& x, const Launch& launch);
void columns_product(const ColumnsProduct& x, const Launch& launch);
// An MLP too wide for one kernel is computed in parts of Tier::part rows and hidden units, whose products the caller
// takes; so is the backward pass of one with few hidden units. A part has all rows, or all hidden units.
void mlp_hidden(const MlpHidden& x, const Launch& launch);
void mlp_local_gradient(const MlpLocalGradient& x, const Launch& launch);

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
