// What the plans of all operators share: the choice of a family of kernels, and the sizes that a plan is made for.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/launch/launch.h"
#include "monoidreduce/operators.h"

namespace monoidreduce {

template <class Call>
FoldProblem problem_of(const Call& x) {
  if constexpr (requires { x.row_index; }) {
    FoldProblem problem = statistics_problem(x);
    problem.score.scale = 1;  // kernels of programs take any scale, so it must not exclude tensor cores
    return problem;
  } else if constexpr (requires { x.program; })
    return modified_problem(x);
  else if constexpr (requires { x.q; })
    return attention_problem(x);
  else if constexpr (requires { x.grad_out, x.hidden; })
    return mlp_gradient_problem(x);
  else if constexpr (requires { x.w2; })
    return mlp_problem(x);
  else if constexpr (requires { x.w1; })
    return mlp_hidden_problem(x);
  else if constexpr (requires { x.teacher_x; })
    return distillation_problem(x);
  else if constexpr (requires { x.target; })
    return cross_entropy_problem(x);
  else
    return logsumexp_problem(x);
}

PlannedSizes planned_sizes(const FoldProblem& p);

// Tensor-core kernels take sizes in multiples of 8. The caller pads other sizes with zeros, and the plan is for the padded
// operands.
constexpr std::int64_t padded_size(std::int64_t size) { return (size + 7) / 8 * 8; }

// Whether a call has kernels for float32 operands in planes, and may take them (Launch::planes).
enum class Planes { kNone, kUnwanted, kWanted };

// Limits of one operator, beyond those of its fold: the largest width of the sm80 kernels, and reasons that exclude both
// tensor-core families (both), or one.
struct Limits {
  std::int64_t widest_sm80 = kFamilies[1].widest;
  Reason both = {}, sm80 = {}, sm90 = {};
  // Whether there are kernels for float32 operands in planes, and what excludes them.
  bool has_planes = false;
  Reason planes = {};
};
// Whether one Hopper kernel computes all gradients of a fold with a payload. Its blocks add to the rows' gradients
// (Plan::adds_rows). Wider folds have a pass for each gradient.
inline bool one_kernel_backward(const FoldProblem& p) { return p.width() <= 128 && p.payload_width() <= 128; }
// Sets the tile of Hopper's backward kernels, for one gradient each or for several at once.
void set_backward_tile(Plan& plan, const FoldProblem& p, bool at_once);
// The largest width of the sm80 backward kernels on this GPU: the widest tiles need more shared memory than some GPUs have.
std::int64_t widest_sm80_backward(const FoldProblem& p, const DeviceFacts& gpu);

// The family for a fold with a payload, by the resident kernels. A bias inside the score must be one per column, as in the MLP.
Choice choose_resident(const FoldProblem& p, const Limits& limits, const DeviceFacts& gpu,
                       const Launch& launch);
// The family for a fold without a payload, of any width, by the contraction kernels.
// planes: whether the call has kernels for float32 operands in planes.
Choice choose_contraction(const FoldProblem& p, const DeviceFacts& gpu, Planes planes = Planes::kNone);
// The same for a call with results that torch multiplies afterwards. In the deterministic mode this depends on cuBLAS.
Choice choose_multiplied(const FoldProblem& p, const DeviceFacts& gpu, const Launch& launch);
// The family for a backward pass whose gradients are products of dlogits (operators.h). The workspace, in bytes, must hold at
// least the dlogits of all rows for one tile of columns.
Choice choose_products(const FoldProblem& p, std::int64_t workspace, const DeviceFacts& gpu,
                       const Launch& launch, Planes planes = Planes::kNone);

// Starts the plan of a call. given: the call as it came; padded: with the sizes of padded operands.
template <class Call>
Plan plan_of(const Call& given, const Call& padded, const Choice& choice, const Launch& launch) {
  const FoldProblem p = problem_of(given);
  const bool pads = choice.family != Family::kSimt;
  return {.call = kDescription<Call>.name,
          .sizes = planned_sizes(pads ? problem_of(padded) : p),
          .choice = choice,
          .deterministic = launch.deterministic,
          .tf32 = launch.tf32,
          .unpadded = {p.width(), std::max(p.other_width(), p.payload_width()), p.columns()}};
}

}  // namespace monoidreduce
