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

#include "monoidreduce/activation.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/monoids/distillation.h"
#include "monoidreduce/ops/attention.h"

namespace monoidreduce {

struct Launch {
  int threads = 1;         // CPU threads
  void* stream = nullptr;  // cudaStream_t
  // No atomic adds whose order may change. The CPU engine is deterministic either way.
  bool deterministic = false;
  // On CUDA, attention and the MLP may round the operands of float32 products to tf32.
  bool tf32 = false;
};

struct CrossEntropyOptions {
  double logit_scale = 1, softcap = 0, label_smoothing = 0, z_loss = 0;
  std::int64_t ignore_index = -100;
  std::int64_t workspace = 0;  // bytes that backward may use for local gradients (dlogits)
};
struct CrossEntropyForward {
  TensorView x, weight, bias, target;  // [N, D] [V, D] [V] [N] int64
  TensorView loss, lse, lse_low;       // [N] [N] [N]
  TensorView scratch;  // of the accumulation type, contiguous; size: cross_entropy_forward_tier
  // Local gradients (dlogits, see below) of the first K classes that forward stores for the backward pass, for an
  // upstream gradient of kept_upstream for every loss; or absent. Only on the tier "sm90", without a bias or softcap.
  TensorView kept;           // [N, K] of the type of x, lines padded to a multiple of 8
  TensorView kept_upstream;  // [1]
  // [N + 1] int64, which rows are active, as order_rows writes it. Other rows are not computed; their statistics are
  // 0. The stored local gradients are in this order, all other results are not. Absent: all rows are computed. Only
  // on the tier "sm90".
  TensorView order;
  // [R, D], where there is an order: a buffer for the active rows of x, R at a time.
  TensorView gathered;
  CrossEntropyOptions options;
};
struct CrossEntropyBackward {
  TensorView grad_loss, grad_lse;  // [N] [N]
  TensorView x, weight, bias, target, lse, lse_low;
  TensorView d_x, d_weight, d_bias;
  CrossEntropyOptions options;
};

// dlogits: the derivatives of the loss with respect to the dot products <x_i, weight_j>, for a slice of the classes.
// weight and bias are that slice; classes is the number of all classes. d_x and d_weight are matrix products of
// dlogits. Only on the tier "sm90".
struct CrossEntropyLocalGradient {
  TensorView grad_loss, grad_lse;                    // [N] [N]
  TensorView x, weight, bias, target, lse, lse_low;  // [N, D] [C, D] [C] [N] [N] [N]
  TensorView out;                                    // [N, C] of the type of x
  // [R, S] float, where there is a bias: sums of out over 16 rows each, for N rows and C columns in whole tiles of
  // 256. Rows that are not active are 0 or not written.
  TensorView sums;
  TensorView order;  // as in the forward pass. x (as scale_rows gathers it), out and sums are in this order.
  std::int64_t first_class = 0, classes = 0;
  CrossEntropyOptions options;
};

struct DistillationOptions {
  DistillationLoss loss = DistillationLoss::kCrossEntropy;
  double temperature = 1;
  std::int64_t workspace = 0;
};
struct DistillationForward {
  TensorView x, weight, teacher_x, teacher_weight, mask;  // [N, D] [V, D] [N, E] [V, E] [N] bool
  TensorView loss, stats;                                 // [N] [6, N]
  TensorView scratch;                                     // as for cross entropy
  // As for cross entropy. kept: with respect to the student's dot products; teacher_kept, of the same size: the
  // weights that these are made from. Not for the reverse KL.
  TensorView kept, teacher_kept;                 // [N, K]
  TensorView kept_upstream;                      // [1]
  TensorView order, gathered, teacher_gathered;  // as for cross entropy; [R, D] and [R, E]
  DistillationOptions options;
};
struct DistillationBackward {
  TensorView grad_loss;  // [N]
  TensorView x, weight, teacher_x, teacher_weight, mask, stats;
  TensorView d_x, d_weight, d_teacher_x, d_teacher_weight;
  DistillationOptions options;
};

// Reduces the tokens' losses to their sum, or to their mean over the active tokens: 0 if no token is active.
struct LossReduction {
  TensorView losses;  // [N]; 0 for tokens that are not active
  // Which tokens are active; each is optional. [N] int64: not ignore_index. [N] bool: true.
  TensorView target, mask;
  TensorView reduced;  // [1]
  std::int64_t ignore_index = -100;
  bool mean = false;
};

// As CrossEntropyLocalGradient, for the columns in weight and teacher_weight. teacher_out is not computed if absent.
struct DistillationLocalGradient {
  TensorView grad_loss;                                          // [N]
  TensorView x, weight, teacher_x, teacher_weight, mask, stats;  // [N, D] [C, D] [N, E] [C, E] [N] [6, N]
  TensorView out, teacher_out;                                   // [N, C] of the type of x
  TensorView order;                                              // as for cross entropy
  DistillationOptions options;
};

// out_i = factor_i x_i, and 0 where factor_i is 0, even if row i holds NaN. On CUDA, for float and 16-bit types. Widths
// are a multiple of 8; rows are dense and 16-byte aligned.
//
// With an order, rows of x are gathered; if scatters is true, rows of out are scattered instead. Without a factor, the
// factor is 1 for active rows and 0 for the others. out may hold only the places from first_place on.
struct RowScaling {
  TensorView x, out;  // [P, D]
  TensorView factor;  // [P] float, in the order; or absent
  TensorView order;   // [P + 1] int64, as order_rows writes it; or absent
  bool scatters = false;
  std::int64_t first_place = 0;
};

// Stable compaction: the indices of the active rows, then of the others, and last the number of active rows.
struct RowOrdering {
  TensorView target, mask;  // as in LossReduction, one of them
  TensorView order;         // [N + 1] int64
  std::int64_t ignore_index = -100;
};

struct MlpForward {
  TensorView x, w1, w2, bias1, bias2;  // [B, M] [K, M] [N, K] [K] [N]
  TensorView out;                      // [B, N]
  TensorView scratch;                  // as attention_forward's; size: mlp_forward_tier
  ActivationKind activation = ActivationKind::kIdentity;
  std::int64_t workspace = 0;  // bytes for hidden values where no kernel can do without them (Tier::part)
};
struct MlpBackward {
  TensorView grad_out;  // [B, N]
  TensorView x, w1, w2, bias1;
  TensorView d_x, d_w1, d_w2, d_bias1;
  ActivationKind activation = ActivationKind::kIdentity;
  std::int64_t workspace = 0;
};

// out = factor a b, where a holds local gradients (dlogits) whose rows are in an order. Active rows come first. The
// other rows of a are 0 up to the next multiple of 64, and are not read beyond. Tensors have the 16-bit type of a
// unless said otherwise; their lines are 16-byte aligned.
//
// out is added to if it is float. If it has the type of a, row order[i] of out is written for place i: 0 if that row is
// not active.
struct RowsProduct {
  TensorView a, b, out;  // [P, C] [C, D] [P, D]
  TensorView factor;     // [P] float, multiplies the rows of the product; or absent
  TensorView order;      // [P + 1] int64, as order_rows writes it; absent: all rows are active
};
// out = scale a^T b, summed over the active rows.
struct ColumnsProduct {
  TensorView a, b;   // [P, C] [P, D]
  TensorView scale;  // [1] float, multiplies the product; or absent
  TensorView out;    // [C, D]
  TensorView order;
};

// A part of an MLP (Tier::part): out = act(x w1^T + bias1) for the rows and hidden units in x, w1 and bias1. The MLP's
// result is the product of out with w2.
struct MlpHidden {
  TensorView x, w1, bias1;  // [R, M] [C, M] [C]
  TensorView out;           // [R, C] of the type of x
  ActivationKind activation = ActivationKind::kIdentity;
};
// The same part in the backward pass: hidden = act(z), and out, the derivative of the loss with respect to the
// pre-activations z. The MLP's gradients are matrix products of these two.
struct MlpLocalGradient {
  TensorView grad_out, x, w1, w2, bias1;  // [R, N] [R, M] [C, M] [N, C] [C]; a column of w2 is dense
  TensorView out, hidden;                 // [R, C] of the type of x
  // float: sums of out over 16 rows each, for rows in whole tiles of 256 and columns in whole tiles of 192; or absent
  TensorView sums;
  ActivationKind activation = ActivationKind::kIdentity;
};

struct LogSumExpForward {
  TensorView a, b, lse, lse_low;  // [M, F] [N, F] [M] [M]
  TensorView scratch;             // as for cross entropy
  double scale = 1;
};
struct LogSumExpBackward {
  TensorView grad_lse, a, b, lse, lse_low;
  TensorView d_a, d_b;
  double scale = 1;
  std::int64_t workspace = 0;  // as for cross entropy
};
// As CrossEntropyLocalGradient, for the columns in b.
struct LogSumExpLocalGradient {
  TensorView grad_lse, a, b, lse, lse_low;  // [M] [M, F] [C, F] [M] [M]
  TensorView out;                           // [M, C] of the type of a
  double scale = 1;
};

// Each operator checks its arguments (checks.h), then calls the engine of its tensors' device. An engine's own entry
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

// The tensor whose device and dtype are those of the call.
template <class Arguments>
  requires(!requires(const Arguments* x) { describe(x); })
const TensorView& leading(const Arguments& arguments) {
  if constexpr (requires { arguments.losses; }) {
    return arguments.losses;
  } else if constexpr (std::is_same_v<Arguments, RowOrdering>) {
    return arguments.order;
  } else if constexpr (requires { arguments.x; }) {
    return arguments.x;
  } else {
    return arguments.a;
  }
}

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
