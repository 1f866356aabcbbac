// The tensor-core tiers of attention and the MLP: the kernels behind attention.cu and mlp_*.cu.
#pragma once

#include <optional>

#include "monoidreduce/launch/packing.h"
#include "monoidreduce/operators.h"

namespace monoidreduce::cuda {

// How the blocks of attention's backward pass share its jobs.
struct JobSharing {
  // 16-byte aligned scratch; its last `words` words must be 0 at first. If in_parts is 0, it is a counter of jobs.
  std::int64_t floats = 0, words = 0;
  int in_parts = 0;  // the number of jobs that are split over several blocks
  // Blocks add to the rows' gradients in a fixed order (turns.cuh, whose scratch is not counted here).
  bool in_turn = false;
};

namespace sm80 {
void attention_forward(const AttentionForward& x, const Launch& launch);
void attention_backward(const AttentionBackward& x, const Launch& launch);
void mlp_forward(const MlpForward& x, const Launch& launch);
void mlp_backward(const MlpBackward& x, const Launch& launch);
// Where an MLP has few rows: how they are taken, or nothing where they are many.
std::optional<Packing> mlp_few_rows(const FoldProblem& p);
void mlp_few_rows(const MlpForward& x, const Packing& packing, const Launch& launch);
// Of an MLP in parts.
void mlp_hidden(const MlpHidden& x, const Launch& launch);
void mlp_local_gradient(const MlpLocalGradient& x, const Launch& launch);
JobSharing backward_sharing(const FoldProblem& p, const Launch& launch);  // of attention
}  // namespace sm80

// As in sm80, and more.
namespace sm90 {
void attention_forward(const AttentionForward& x, const Launch& launch);
void attention_backward(const AttentionBackward& x, const Launch& launch);
void mlp_forward(const MlpForward& x, const Launch& launch);
void mlp_backward(const MlpBackward& x, const Launch& launch);
std::optional<Packing> mlp_few_rows(const FoldProblem& p);
void mlp_few_rows(const MlpForward& x, const Packing& packing, const Launch& launch);
void mlp_hidden(const MlpHidden& x, const Launch& launch);
void mlp_local_gradient(const MlpLocalGradient& x, const Launch& launch);
JobSharing backward_sharing(const FoldProblem& p, const Launch& launch);
// Attention's forward pass where rows are few: how they are packed, or nothing where they are many; and the scratch that it
// takes, in floats.
std::optional<Packing> few_rows(const FoldProblem& p);
std::int64_t few_rows_scratch(const FoldProblem& p, const Packing& packing);
void attention_few_rows(const AttentionForward& x, const Packing& packing, const Launch& launch);
// Does one kernel take all gradients, so that blocks add to those of the rows (Tier::adds_rows); else each has a pass.
inline bool gradients_at_once(const FoldProblem& p) { return p.width() <= 128 && p.payload_width() <= 128; }
}  // namespace sm90

}  // namespace monoidreduce::cuda
