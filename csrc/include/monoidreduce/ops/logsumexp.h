// logsumexp_matmul: the log-sum-exp of each row of scale a b^T.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/kept.h"
#include "monoidreduce/ops/matrix.h"
#include "monoidreduce/ops/planes.h"

namespace monoidreduce {

// mean_i: the mean of the rows of b under row i's softmax probabilities p_ij = exp(x_ij - lse_i). scale * mean_i is the
// derivative of lse_i with respect to a_i. Must be present exactly if the plan is narrow.
struct LogSumExpForward {
  TensorView a, b, lse, lse_low, mean;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  // kept: the dlogits of the first K columns of b, for a gradient of kept_upstream for every lse. Lines are padded to a multiple
  // of 8. Present exactly if the plan saves dlogits (Plan::saved).
  TensorView kept;
  TensorView row_planes, column_planes;  // of a and b
  double scale = 1, kept_upstream = 1;
  std::int64_t saved_columns = 0;  // read by planning, see saved_columns()
};
template <std::same_as<LogSumExpForward> X>
constexpr auto describe(const X*) {
  return pass("logsumexp_forward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, tensor("a", &X::a, "M F"),
              tensor("b", &X::b, "N F"), result("lse", &X::lse, "M", Type::kAccumulation),
              result("lse_low", &X::lse_low, "M", Type::kAccumulation),
              result("mean", &X::mean, "M F").maybe(), scratch("scratch", &X::scratch),
              result("kept", &X::kept, "M K").maybe().strided().where(&check_kept<X>),
              planes_of_operands<X>("M", "N", "F"), option("scale", &X::scale),
              option("kept_upstream", &X::kept_upstream), saved_columns(&X::saved_columns));
}

template <class Call>
constexpr auto logsumexp_backward_operands() {
  return fields(tensor("a", &Call::a, "M F"), tensor("b", &Call::b, "N F"),
                tensor("grad_lse", &Call::grad_lse, "M", Type::kAccumulation),
                tensor("lse", &Call::lse, "M", Type::kAccumulation).dense(),
                tensor("lse_low", &Call::lse_low, "M", Type::kAccumulation).dense());
}

// On CUDA this call takes the SIMT kernels, or folds if the plan is narrow. Folds write d_a and d_b in a's dtype, and need the
// mean for d_a. Under any other plan the caller computes both as products of dlogits (LogSumExpLocalGradient).
struct LogSumExpBackward {
  TensorView grad_lse, a, b, lse, lse_low, mean, d_a, d_b;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  double scale = 1;
  std::int64_t workspace = 0;  // bytes for dlogits
};
template <std::same_as<LogSumExpBackward> X>
constexpr auto describe(const X*) {
  return pass("logsumexp_backward", kCpu | kSimt | kSm80 | kSm90, logsumexp_backward_operands<X>(),
              optional("mean", &X::mean, "M F").dense(), gradient("da", &X::d_a, "M F", Type::kPlanGradient),
              gradient("db", &X::d_b, "N F", Type::kPlanGradient), scratch("scratch", &X::scratch),
              option("scale", &X::scale), workspace(&X::workspace));
}

// Like CrossEntropyLocalGradient, for the columns in b.
struct LogSumExpLocalGradient {
  TensorView grad_lse, a, b, lse, lse_low, out;
  TensorView row_planes, column_planes;  // of a and b
  double scale = 1;
};
template <std::same_as<LogSumExpLocalGradient> X>
constexpr auto describe(const X*) {
  return part<LogSumExpBackward>("logsumexp_local_gradient", kSm80 | kSm90 | kPlanes,
                                 logsumexp_backward_operands<X>(), result("out", &X::out, "M N").strided(),
                                 planes_of_operands<X>("M", "N", "F"), option("scale", &X::scale));
}

template <class Call>
[[gnu::always_inline]] inline FoldProblem logsumexp_problem(const Call& x) {
  const FoldProblem p{.a = as_rows(x.a), .b = as_rows(x.b), .score = {.scale = x.scale}};
  if constexpr (requires { x.row_planes; }) return with_planes(x, p);
  return p;
}

}  // namespace monoidreduce
