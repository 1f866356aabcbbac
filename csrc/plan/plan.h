// What the plans of all operators share: the choice of a family of kernels for a fold, and what a plan is of.
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
    problem.score.scale = 1;  // programs take any
    return problem;
  } else if constexpr (requires { x.kernel; })
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

// Operands come to tensor cores with sizes that are multiples of 8. The caller pads others with zeros, and a
// plan is of padded operands.
constexpr std::int64_t padded_size(std::int64_t size) { return (size + 7) / 8 * 8; }

// Widths that the kernels go up to, and what keeps a call from kernels of any tensor cores or of one family, whatever its fold.
struct Limits {
  std::int64_t widest_sm80 = kFamilies[1].widest;
  Reason both = {}, sm80 = {}, sm90 = {};
};
// Does one kernel of Hopper's compute all gradients of a fold with a payload. Its blocks then add to the
// gradients of the rows (Plan::adds_rows). Else each gradient has a pass.
inline bool gradients_at_once(const FoldProblem& p) { return p.width() <= 128 && p.payload_width() <= 128; }
TileSize backward_tile(const FoldProblem& p);  // of Hopper's
// Backward tiles of sm_80 differ in what shared memory they need.
std::int64_t widest_sm80_backward(const FoldProblem& p, const DeviceFacts& gpu);

// Of a fold with a payload. A bias inside a score must be one of columns, as in the MLP.
Choice choose_resident(const FoldProblem& p, const Limits& limits, const DeviceFacts& gpu,
                       const Launch& launch);
// Of a fold without a payload whose widths may be any.
Choice choose_contraction(const FoldProblem& p, const DeviceFacts& gpu);
// The same, of a call whose results torch multiplies.
Choice choose_multiplied(const FoldProblem& p, const DeviceFacts& gpu, const Launch& launch);
// Of a backward pass whose gradients are products of local gradients (operators.h). A workspace of so many
// bytes must hold the local gradients of all rows in one tile of columns.
Choice choose_products(const FoldProblem& p, std::int64_t workspace, const DeviceFacts& gpu,
                       const Launch& launch);

// Of a call, given and with padded operands.
template <class Call>
Plan plan_of(const Call& given, const Call& padded, const Choice& choice, const Launch& launch) {
  const FoldProblem p = problem_of(given);
  const bool pads = choice.family != Family::kSimt;
  return {.call = kDescription<Call>.name,
          .sizes = planned_sizes(pads ? problem_of(padded) : p),
          .choice = choice,
          .deterministic = launch.deterministic,
          .tf32 = launch.tf32,
          .given = {p.width(), std::max(p.other_width(), p.payload_width()), p.columns()}};
}

}  // namespace monoidreduce
