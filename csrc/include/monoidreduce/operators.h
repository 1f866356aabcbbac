// The host API: the library's operators on tensor views, on the CPU and on CUDA devices. Torch-free; the
// caller allocates.
//
// On the CPU a gradient is written in the input's type; on CUDA it is accumulated into a zero-filled contiguous
// buffer of the accumulation type (float, double for float64), as a bias's gradient is on both. Only the
// tensor-core tiers write gradients in the input's type on CUDA too: those of columns (d_k, d_v, d_w1, d_w2) always, those
// of rows (d_q, d_x) where Tier::adds_rows is false; all of them must be there. Absent: not computed.
//
// A log-sum-exp is kept in two words, lse and lse_low (LogNumber): forward writes both, backward reads both.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "monoidreduce/activation.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/monoids/distillation.h"

namespace monoidreduce {

struct Launch {
  int threads = 1;         // CPU threads
  void* stream = nullptr;  // cudaStream_t
  bool deterministic =
      false;  // no atomic adds whose order may change; the CPU engine is deterministic either way
  bool tf32 =
      false;  // on CUDA: may factors of float32 products be rounded to tf32, for attention and the MLP
};

struct AttentionOptions {
  double scale = 1, softcap = 0;
  std::int64_t left = ColumnRange::kUnbounded,
               right = ColumnRange::kUnbounded;  // window around the aligned query
};
struct AttentionForward {
  TensorView q, k, v, bias;      // [B, H, M, F] [B, Hkv, N, F] [B, Hkv, N, D] [B, H, M, N]
  TensorView out, lse, lse_low;  // [B, H, M, D] [B, H, M] [B, H, M]
  TensorView scratch;  // as attention_backward's, on 16 bytes, of the size that attention_forward_tier says
  AttentionOptions options;
};
struct AttentionBackward {
  TensorView grad_out, grad_lse;  // [B, H, M, D] [B, H, M]
  TensorView q, k, v, bias, out, lse, lse_low;
  TensorView d_q, d_k, d_v, d_bias;
  TensorView scratch;  // of the accumulation type, contiguous, of the size that attention_backward_tier says
  AttentionOptions options;
  bool whole = true;  // are k and v all keys that out and lse are of, or a slice of them
};

struct CrossEntropyOptions {
  double logit_scale = 1, softcap = 0, label_smoothing = 0, z_loss = 0;
  std::int64_t ignore_index = -100;
  std::int64_t workspace = 0;  // bytes that the backward may use for local gradients
};
struct CrossEntropyForward {
  TensorView x, weight, bias, target;  // [N, D] [V, D] [V] [N] int64
  TensorView loss, lse, lse_low;       // [N] [N] [N]
  TensorView
      scratch;  // of the accumulation type, contiguous, of the size that cross_entropy_forward_tier says
  // The local gradients (below) of the first K classes where every loss has this upstream gradient; or absent. Only on the
  // tier "sm90", without a bias or softcap.
  TensorView kept;           // [N, K] of the type of x, lines padded to a multiple of 8
  TensorView last_kept;      // the same of the last classes, from a multiple of 256 on,
  TensorView late_kept;      // and of those before them, from a multiple of 256 on
  TensorView kept_upstream;  // [1]
  // [N + 1] int64, which rows count, as order_rows writes it: of the others nothing is computed, and their statistics are 0. What
  // is kept is in this order, all else is not. Absent: all are computed. Only on the tier "sm90".
  TensorView order;
  // [R, D] where there is an order and something is kept: room for x in it, R rows at a time.
  TensorView gathered;
  CrossEntropyOptions options;
};
inline constexpr int kKeptTile = 256;  // classes
inline bool keeps(const CrossEntropyForward& x) {
  return x.kept.present() || x.last_kept.present() || x.late_kept.present();
}
struct ClassRange {
  std::int64_t begin, end;
};
// Those of late_kept; from the end on, those of last_kept.
inline ClassRange late_classes(const CrossEntropyForward& x) {
  const auto count = [](const TensorView& kept) { return kept.present() ? kept.size[1] : 0; };
  const std::int64_t end = x.weight.size[0] - count(x.last_kept);
  return {end - count(x.late_kept), end};
}
struct CrossEntropyBackward {
  TensorView grad_loss, grad_lse;  // [N] [N]
  TensorView x, weight, bias, target, lse, lse_low;
  TensorView d_x, d_weight, d_bias;
  CrossEntropyOptions options;
};

// The derivatives of the loss by the dot products <x_i, weight_j>, for some of the classes: weight and bias are theirs,
// classes is the number of all. The gradients are products of them. Only on the tier "sm90".
struct CrossEntropyLocalGradient {
  TensorView grad_loss, grad_lse;                    // [N] [N]
  TensorView x, weight, bias, target, lse, lse_low;  // [N, D] [C, D] [C] [N] [N] [N]
  TensorView out;                                    // [N, C] of the type of x
  TensorView
      sums;  // [R, S] float, where there is a bias: those of 16 rows each; R, S: N, C in whole tiles of 256
  TensorView
      order;  // as in the forward pass; x, as scale_rows gathers it, out and sums are in this order, the latter of
              // rows that do not count 0 or not written
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
  // As for cross entropy: those by the student's dot products. teacher_kept: what they are made of, as large. Not for the
  // reverse KL.
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

// What is left of the losses of tokens: their sum, or their mean over the tokens that count, 0 where none does.
struct LossReduction {
  TensorView losses;        // [N]; 0 where a token does not count
  TensorView target, mask;  // which count, each optional: [N] int64, not ignore_index; [N] bool, true
  TensorView reduced;       // [1]
  std::int64_t ignore_index = -100;
  bool mean = false;
};

// As CrossEntropyLocalGradient: for the columns that weight and teacher_weight hold. teacher_out: absent, not computed.
struct DistillationLocalGradient {
  TensorView grad_loss;                                          // [N]
  TensorView x, weight, teacher_x, teacher_weight, mask, stats;  // [N, D] [C, D] [N, E] [C, E] [N] [6, N]
  TensorView out, teacher_out;                                   // [N, C] of the type of x
  TensorView order;                                              // as for cross entropy
  DistillationOptions options;
};

// out_i = factor_i x_i, and 0 where factor_i is 0, whatever the row holds. On CUDA, for float and 16-bit types, widths a
// multiple of 8, rows dense and on 16-byte boundaries. With an order the rows of x are taken from there, or, if it scatters,
// those of out are put there; without a factor it is 1 for rows that count, else 0. out may be of some places alone, those
// from first_place on; and where all rows count, and the order is that in which they lie, it may not be needed.
struct RowScaling {
  TensorView x, out;  // [P, D]
  TensorView factor;  // [P] float, in the order; or absent
  TensorView order;   // [P + 1] int64, as order_rows writes it; or absent
  bool scatters = false;
  std::int64_t first_place = 0;
  bool needed_if_all_count = true;
};

// The rows that count, and then the others, both as they follow each other; last, how many count. If more than `most` do, it is
// as if all did: to leave out few takes longer than to compute them.
struct RowOrdering {
  TensorView target, mask;  // as in LossReduction, one of them
  TensorView order;         // [N + 1] int64
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  std::int64_t ignore_index = -100;
};

struct MlpForward {
  TensorView x, w1, w2, bias1, bias2;  // [B, M] [K, M] [N, K] [K] [N]
  TensorView out;                      // [B, N]
  TensorView scratch;                  // as attention_forward's, of the size that mlp_forward_tier says
  ActivationKind activation = ActivationKind::kIdentity;
  std::int64_t workspace = 0;  // bytes that hidden values may take where no kernel does without (Tier::part)
};
struct MlpBackward {
  TensorView grad_out;  // [B, N]
  TensorView x, w1, w2, bias1;
  TensorView d_x, d_w1, d_w2, d_bias1;
  TensorView scratch;  // as attention_forward's, of the size that mlp_backward_tier says
  ActivationKind activation = ActivationKind::kIdentity;
  std::int64_t workspace = 0;
};

// Products with local gradients a whose rows are in an order: those that count come first, the others are 0 up to the next
// multiple of 64 and not read beyond. Of the 16-bit type of a where nothing else is said, lines on 16-byte boundaries.
// out: of floats, added to; or of the type of a: row order[i] is written for place i, with 0 if it does not count.
struct RowsProduct {
  TensorView a, b, out;  // [P, C] [C, D] [P, D]
  TensorView factor;     // [P] float, what the product's rows are multiplied by; or absent
  TensorView order;      // [P + 1] int64, as order_rows writes it; absent: all count
};
// The transpose of a times b, over the rows that count.
struct ColumnsProduct {
  TensorView a, b;  // [P, C] [P, D]
  TensorView
      ungathered_b;  // [P, D] read instead of b if all rows count, in which case they lie in order; or absent
  TensorView scale;  // [1] float, what the product is multiplied by; or absent
  TensorView out;    // [C, D]
  TensorView order;
};

// Of an MLP in parts (Tier::part): act(x w1^T + bias1) of some rows and hidden units, those that x, w1 and bias1 hold. The
// result is its product with w2.
struct MlpHidden {
  TensorView x, w1, bias1;  // [R, M] [C, M] [C]
  TensorView out;           // [R, C] of the type of x
  ActivationKind activation = ActivationKind::kIdentity;
};
// The same, and the derivatives by the arguments of the activation. The gradients are products of the two.
struct MlpLocalGradient {
  TensorView grad_out, x, w1, w2, bias1;  // [R, N] [R, M] [C, M] [N, C] [C]; a column of w2 is dense
  TensorView out, hidden;                 // [R, C] of the type of x
  TensorView
      sums;  // float: those of out over 16 rows each, rows in whole tiles of 256, columns of 192; or absent
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
// As CrossEntropyLocalGradient: for the columns that b holds.
struct LogSumExpLocalGradient {
  TensorView grad_lse, a, b, lse, lse_low;  // [M] [M, F] [C, F] [M] [M]
  TensorView out;                           // [M, C] of the type of a
  double scale = 1;
};

// Every operator that an engine provides, one line each: X(name, argument struct).
#define MONOIDREDUCE_OPERATORS(X)                 \
  X(attention_forward, AttentionForward)          \
  X(attention_backward, AttentionBackward)        \
  X(cross_entropy_forward, CrossEntropyForward)   \
  X(cross_entropy_backward, CrossEntropyBackward) \
  X(distillation_forward, DistillationForward)    \
  X(distillation_backward, DistillationBackward)  \
  X(reduce_losses, LossReduction)                 \
  X(mlp_forward, MlpForward)                      \
  X(mlp_backward, MlpBackward)                    \
  X(logsumexp_forward, LogSumExpForward)          \
  X(logsumexp_backward, LogSumExpBackward)

// Each operator checks its arguments (checks.h), then runs on the engine of the device that its tensors are
// on. An engine's own entry points check nothing.
#define MONOIDREDUCE_DECLARE(name, Arguments) void name(const Arguments& arguments, const Launch& launch);
MONOIDREDUCE_OPERATORS(MONOIDREDUCE_DECLARE)
namespace cpu {
MONOIDREDUCE_OPERATORS(MONOIDREDUCE_DECLARE)
}
namespace cuda {
MONOIDREDUCE_OPERATORS(MONOIDREDUCE_DECLARE)
}
#undef MONOIDREDUCE_DECLARE

// Which kernels a call runs on: the instruction set on the CPU, "simt", "sm80" or "sm90" on CUDA; and why. Before the backward
// pass the caller asks, because it allocates the gradients; those need not be there yet.
//
// Where that is "sm80" or "sm90", the caller pads sizes that are no multiple of 8 with zeros: the widths of operands and, in an
// MLP, the hidden units. Scratch, parts and gradients are those of the padded call. Attention and the MLP not padded so run on the
// tier "simt".
struct Tier {
  std::string name, reason;
  std::int64_t scratch = 0;  // elements of the accumulation type that the call needs
  bool adds_rows =
      true;         // does it add to the gradients of rows (d_q, d_x), or write them in the inputs' type
  TileSize part{};  // mlp: the rows and hidden units whose hidden values the caller holds at a time; or none
};
Tier attention_forward_tier(const AttentionForward& arguments, const Launch& launch);
Tier attention_backward_tier(const AttentionBackward& arguments, const Launch& launch);
Tier mlp_forward_tier(const MlpForward& arguments, const Launch& launch);
Tier mlp_backward_tier(const MlpBackward& arguments, const Launch& launch);
Tier cross_entropy_forward_tier(const CrossEntropyForward& arguments, const Launch& launch);
Tier cross_entropy_backward_tier(const CrossEntropyBackward& arguments, const Launch& launch);
Tier distillation_forward_tier(const DistillationForward& arguments, const Launch& launch);
Tier distillation_backward_tier(const DistillationBackward& arguments, const Launch& launch);
Tier logsumexp_forward_tier(const LogSumExpForward& arguments, const Launch& launch);
Tier logsumexp_backward_tier(const LogSumExpBackward& arguments, const Launch& launch);

// Can the forward pass of a loss keep local gradients: is it on the tier "sm90", and its gradients are products of them.
// For 16-bit tensors of these widths (other_width 0 where there is one pair) with less than 2^30 rows and columns.
bool can_keep(int cuda_device, std::int64_t width, std::int64_t other_width, double scale,
              const Launch& launch);

// On the tensor-core tiers the gradients of a loss are products of local gradients, which the caller takes: it asks for those
// of scratch / N classes at a time (rounded up, the last time fewer), scratch being what the backward tier says, in
// elements of the type of x.
void cross_entropy_local_gradient(const CrossEntropyLocalGradient& arguments, const Launch& launch);
void distillation_local_gradient(const DistillationLocalGradient& arguments, const Launch& launch);
void logsumexp_local_gradient(const LogSumExpLocalGradient& arguments, const Launch& launch);
// Rows for the products with local gradients: gathered, multiplied, or put back.
void scale_rows(const RowScaling& arguments, const Launch& launch);
// For kernels that leave rows out.
void order_rows(const RowOrdering& arguments, const Launch& launch);
// The products, only on the tier "sm90".
void rows_product(const RowsProduct& arguments, const Launch& launch);
void columns_product(const ColumnsProduct& arguments, const Launch& launch);
// An MLP too wide for one kernel, or backward one of few hidden units, comes in parts: what the caller multiplies is of
// Tier::part rows and hidden units at a time. One of the two is all there are.
void mlp_hidden(const MlpHidden& arguments, const Launch& launch);
void mlp_local_gradient(const MlpLocalGradient& arguments, const Launch& launch);
namespace cuda {
bool can_keep(int cuda_device, std::int64_t width, std::int64_t other_width, double scale,
              const Launch& launch);
Tier attention_forward_tier(const AttentionForward& arguments, const Launch& launch);
Tier attention_backward_tier(const AttentionBackward& arguments, const Launch& launch);
Tier mlp_forward_tier(const MlpForward& arguments, const Launch& launch);
Tier mlp_backward_tier(const MlpBackward& arguments, const Launch& launch);
Tier cross_entropy_forward_tier(const CrossEntropyForward& arguments, const Launch& launch);
Tier cross_entropy_backward_tier(const CrossEntropyBackward& arguments, const Launch& launch);
Tier distillation_forward_tier(const DistillationForward& arguments, const Launch& launch);
Tier distillation_backward_tier(const DistillationBackward& arguments, const Launch& launch);
Tier logsumexp_forward_tier(const LogSumExpForward& arguments, const Launch& launch);
Tier logsumexp_backward_tier(const LogSumExpBackward& arguments, const Launch& launch);
void cross_entropy_local_gradient(const CrossEntropyLocalGradient& arguments, const Launch& launch);
void distillation_local_gradient(const DistillationLocalGradient& arguments, const Launch& launch);
void logsumexp_local_gradient(const LogSumExpLocalGradient& arguments, const Launch& launch);
void scale_rows(const RowScaling& arguments, const Launch& launch);
void order_rows(const RowOrdering& arguments, const Launch& launch);
void rows_product(const RowsProduct& arguments, const Launch& launch);
void columns_product(const ColumnsProduct& arguments, const Launch& launch);
void mlp_hidden(const MlpHidden& arguments, const Launch& launch);
void mlp_local_gradient(const MlpLocalGradient& arguments, const Launch& launch);
}  // namespace cuda

// The tensor that decides the device and the dtype of a call.
template <class Arguments>
const TensorView& leading(const Arguments& arguments) {
  if constexpr (requires { arguments.q; }) {
    return arguments.q;
  } else if constexpr (requires { arguments.losses; }) {
    return arguments.losses;
  } else if constexpr (std::is_same_v<Arguments, RowOrdering>) {
    return arguments.order;
  } else if constexpr (requires { arguments.x; }) {
    return arguments.x;
  } else {
    return arguments.a;
  }
}

// The instruction set that the CPU engine uses: "baseline", "avx2", "avx512", "avx512bf16". The best that
// this build and this processor both have, unless the environment variable MONOIDREDUCE_CPU_ISA names another;
// decided once, at the first call.
const char* cpu_isa();
const char* cpu_isa(DType dtype);  // whose code computes on that type: avx512bf16 has none but for bfloat16
std::vector<std::string> cpu_isas();  // what MONOIDREDUCE_CPU_ISA may be here, worst first

// What the CPU engine computes at a time. Forward: a panel of rows by a tile of columns; backward: a chunk of
// rows by a block of columns.
struct CpuTiles {
  TileSize forward, backward;
};
CpuTiles cpu_tiles(const FoldProblem& problem, bool bias_gradient, int threads);

}  // namespace monoidreduce
