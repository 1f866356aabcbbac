// logsumexp_matmul: the log-sum-exp of scale a b^T by rows.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/matrix.h"

namespace monoidreduce {

// mean: of the rows of b, weighted by each row's shares exp(x_ij - lse_i). scale times it is the derivative of lse by a. Only
// where the plan is narrow, and then it must be there.
struct LogSumExpForward {
  TensorView a, b, lse, lse_low, mean;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  double scale = 1;
};
template <std::same_as<LogSumExpForward> X>
constexpr auto describe(const X*) {
  return pass("logsumexp_forward", kCpu | kSimt | kSm80 | kSm90, tensor("a", &X::a, "M F"),
              tensor("b", &X::b, "N F"), result("lse", &X::lse, "M", Type::kAccumulation),
              result("lse_low", &X::lse_low, "M", Type::kAccumulation),
              result("mean", &X::mean, "M F").maybe(), scratch("scratch", &X::scratch),
              option("scale", &X::scale));
}

template <class Call>
constexpr auto logsumexp_backward_operands() {
  return fields(tensor("a", &Call::a, "M F"), tensor("b", &Call::b, "N F"),
                tensor("grad_lse", &Call::grad_lse, "M", Type::kAccumulation),
                tensor("lse", &Call::lse, "M", Type::kAccumulation).dense(),
                tensor("lse_low", &Call::lse_low, "M", Type::kAccumulation).dense());
}

// On CUDA by the SIMT kernels, or by folds where the plan is narrow. By folds, d_a and d_b are of a's dtype,
// and d_a needs the mean. Else both are products of local gradients.
struct LogSumExpBackward {
  TensorView grad_lse, a, b, lse, lse_low, mean, d_a, d_b;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  double scale = 1;
  std::int64_t workspace = 0;  // bytes for local gradients
};
template <std::same_as<LogSumExpBackward> X>
constexpr auto describe(const X*) {
  return pass("logsumexp_backward", kCpu | kSimt | kSm80 | kSm90, logsumexp_backward_operands<X>(),
              optional("mean", &X::mean, "M F").dense(), gradient("da", &X::d_a, "M F", Type::kPlanGradient),
              gradient("db", &X::d_b, "N F", Type::kPlanGradient), scratch("scratch", &X::scratch),
              option("scale", &X::scale), workspace(&X::workspace));
}

// As CrossEntropyLocalGradient, for the columns in b.
struct LogSumExpLocalGradient {
  TensorView grad_lse, a, b, lse, lse_low, out;
  double scale = 1;
};
template <std::same_as<LogSumExpLocalGradient> X>
constexpr auto describe(const X*) {
  return part<LogSumExpBackward>("logsumexp_local_gradient", kSm80 | kSm90, logsumexp_backward_operands<X>(),
                                 result("out", &X::out, "M N").strided(), option("scale", &X::scale));
}

template <class Call>
[[gnu::always_inline]] inline FoldProblem logsumexp_problem(const Call& x) {
  return {.a = as_rows(x.a), .b = as_rows(x.b), .score = {.scale = x.scale}};
}

}  // namespace monoidreduce
