// logsumexp_matmul: the log-sum-exp of scale a b^T by rows.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/matrix.h"

namespace monoidreduce {

struct LogSumExpForward {
  TensorView a, b, lse, lse_low;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  double scale = 1;
};
template <std::same_as<LogSumExpForward> X>
constexpr auto describe(const X*) {
  return call("logsumexp_forward", tensor("a", &X::a, "M F"), tensor("b", &X::b, "N F"),
              result("lse", &X::lse, "M", Type::kAccumulation),
              result("lse_low", &X::lse_low, "M", Type::kAccumulation), scratch("scratch", &X::scratch),
              option("scale", &X::scale));
}

template <class Call>
constexpr auto logsumexp_backward_operands() {
  return fields(tensor("a", &Call::a, "M F"), tensor("b", &Call::b, "N F"),
                tensor("grad_lse", &Call::grad_lse, "M", Type::kAccumulation),
                tensor("lse", &Call::lse, "M", Type::kAccumulation).dense(),
                tensor("lse_low", &Call::lse_low, "M", Type::kAccumulation).dense());
}

struct LogSumExpBackward {
  TensorView grad_lse, a, b, lse, lse_low, d_a, d_b;
  double scale = 1;
  std::int64_t workspace = 0;  // bytes for local gradients
};
template <std::same_as<LogSumExpBackward> X>
constexpr auto describe(const X*) {
  return call("logsumexp_backward", logsumexp_backward_operands<X>(), gradient("da", &X::d_a, "M F"),
              gradient("db", &X::d_b, "N F"), option("scale", &X::scale), workspace(&X::workspace));
}

// As CrossEntropyLocalGradient, for the columns in b.
struct LogSumExpLocalGradient {
  TensorView grad_lse, a, b, lse, lse_low, out;
  double scale = 1;
};
template <std::same_as<LogSumExpLocalGradient> X>
constexpr auto describe(const X*) {
  return cuda_call("logsumexp_local_gradient", logsumexp_backward_operands<X>(),
                   result("out", &X::out, "M N").strided(), option("scale", &X::scale));
}

template <class Call>
[[gnu::always_inline]] inline FoldProblem logsumexp_problem(const Call& x) {
  return {.a = as_rows(x.a), .b = as_rows(x.b), .score = {.scale = x.scale}};
}

}  // namespace monoidreduce
