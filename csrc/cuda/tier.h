// Which of the GPU's kernels a call runs on.
#pragma once

#include <string>

#include "engine.h"
#include "monoidreduce/fold.h"

namespace monoidreduce::cuda {

inline constexpr const char *kSimt = "simt", *kSm80 = "sm80", *kSm90 = "sm90";

#ifdef MONOIDREDUCE_WITH_SM90
inline constexpr bool kWithSm90 = true;
#else
inline constexpr bool kWithSm90 = false;
#endif

// Widths that the kernels of the tensor-core tiers go up to.
struct Widest {
  std::int64_t sm80, sm90;
};

// What keeps a call from tensor cores, or from the kernels of one tier, whatever its fold; "" for nothing.
struct Obstacles {
  std::string both, sm80, sm90;
};

// The fastest tier that takes a fold with a payload, and what keeps it from faster ones. A bias inside a score must be one
// of columns, as in the MLP.
Tier fastest_tier(const FoldProblem& p, const Widest& widest, const Launch& launch,
                  const Obstacles& obstacles = {});

// Of the GPU that the tensors are on: the kernels of sm_80 differ in what shared memory they need. transposed: does the
// payload lie with its columns adjacent.
std::int64_t widest_sm80_forward(const FoldProblem& p, bool transposed);
std::int64_t widest_sm80_backward(const FoldProblem& p);

// Operands come to tensor cores with sizes that are multiples of 8: what has others is padded with zeros by the caller, and
// the tier of a call is that of padded operands. What a tier says of a width that is.
std::int64_t padded_size(std::int64_t size);
std::string padding_of_width(std::int64_t width);

Tier not_tensor_cores(const std::string& obstacle);
// The tier of a fold without a payload whose widths may be any: a contraction's kernels, or SIMT. Where a width is no multiple
// of 8 it is that of operands padded with zeros.
Tier contraction_tier(const FoldProblem& p);
// The same, of a call whose results torch multiplies.
Tier multiplied_tier(const FoldProblem& p, const Launch& launch);
// The tier of a backward pass whose gradients are products of local gradients (operators.h), of which a workspace of so many
// bytes must hold a tile of columns.
Tier products_tier(const FoldProblem& p, std::int64_t workspace, const Launch& launch);

// Has the caller given what the tier asks for.
void require_scratch(const TensorView& scratch, const Tier& tier);

}  // namespace monoidreduce::cuda
