// The two-layer MLP on the CPU: a sum over hidden units of activation times payload. The hidden layer is
// never stored.
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/problems.h"
#include "monoidreduce/rows.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// The sum of the activation that `kind` names, for loops over elements (with_named of cpu/panels.h); whatever else a fold asks
// of its monoid is the same for all, and the base's.
template <class R>
struct NamedSum : Sum<R> {
  ActivationKind kind;

  template <class F>
  void with_named(F f) const {
    switch (kind) {
      case ActivationKind::kRelu:
        return f(Sum<R, Relu>{});
      case ActivationKind::kRelu2:
        return f(Sum<R, Relu2>{});
      case ActivationKind::kGelu:
        return f(Sum<R, Gelu>{});
      case ActivationKind::kGeluTanh:
        return f(Sum<R, GeluTanh>{});
      case ActivationKind::kSilu:
        return f(Sum<R, Silu>{});
      case ActivationKind::kTanh:
        return f(Sum<R, Tanh>{});
      case ActivationKind::kSigmoid:
        return f(Sum<R, Sigmoid>{});
      case ActivationKind::kIdentity:
        return f(Sum<R, Identity>{});
    }
  }
};

void mlp_forward(const MlpForward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    fold_forward<NamedSum, T>({{}, x.activation}, mlp_problem(x, x.bias2), SumRows<T>{}, as_rows(x.out),
                              launch.threads);
  });
}

void mlp_backward(const MlpBackward& x, const Launch& launch) {
  with_accumulator(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients gradients{.grad_out = as_rows(x.grad_out),
                                  .d_a = as_rows(x.d_x),
                                  .d_b = as_rows(x.d_w1),
                                  .d_other_a = {},
                                  .d_other_b = {},
                                  .d_payload = as_rows(transposed(x.d_w2)),
                                  .d_bias = as_column_bias(x.d_bias1, x.x.size[0])};
    fold_backward<NamedSum, T>({{}, x.activation}, mlp_problem(x), SumRows<T>{}, gradients, launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
