// Scores of a few classes of each row, and their part of the dlogits (local gradients). For losses against several targets.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/ops/rows.h"

namespace monoidreduce {

// scores_ik = <x_i, weight_c> for the class c = target_ik of the slice `weight`, from first_class on; 0 if target_ik is not one
// of these classes.
struct TargetScores {
  TensorView x, weight, target, scores;
  std::int64_t first_class = 0;
};
template <std::same_as<TargetScores> X>
constexpr auto describe(const X*) {
  return helper("target_scores", kGpus, tensor("x", &X::x, "N D"), tensor("weight", &X::weight, "V D"),
                tensor("target", &X::target, "N K", Type::kInt64).dense(),
                result("scores", &X::scores, "N K", Type::kAccumulation),
                option("first_class", &X::first_class));
}

// Writes value_ik to the dlogits of row i and class target_ik, if that is one of the classes of this slice, which begins with
// first_class. Equal targets of a row must have equal values. The rows of dlogits are in an order, active ones first; nothing
// is written to the others.
struct TargetDlogits {
  TensorView values, target, dlogits, order;
  std::int64_t first_class = 0;
};
template <std::same_as<TargetDlogits> X>
constexpr auto describe(const X*) {
  return helper("target_dlogits", kGpus, tensor("values", &X::values, "N K").dense(),
                tensor("target", &X::target, "N K", Type::kInt64).dense(),
                result("dlogits", &X::dlogits, "N C", Type::kUpToFloat32).strided(), order_of(&X::order, "N"),
                option("first_class", &X::first_class));
}

}  // namespace monoidreduce
