// Attention on the CPU: softmax-weighted payload, LogSumExp over keys.
#include "monoidreduce/ops/attention.h"
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/rows.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {
namespace {

// of_lse[row] = grad_lse, 0 where there is none, and centre[row] = grad_lse - <grad_out, out>, row by row.
template <class T>
void row_centres(const AttentionBackward& x, int threads, T* of_lse, T* centre) {
  const std::int64_t heads = x.q.size[1], rows = x.q.size[2], width = x.out.size[3];
  const auto at = [](const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t i) {
    return b * t.stride[0] + h * t.stride[1] + i * t.stride[2];
  };
  parallel_for(threads, x.q.size[0] * heads, [&](std::int64_t problem, int) {
    const std::int64_t b = problem / heads, h = problem % heads;
    Scratch<T> out(width), grad(width);
    for (std::int64_t i = 0; i < rows; ++i) {
      T sum = 0;
      double dot = 0;
      if (x.grad_lse.present()) load_row(x.grad_lse, at(x.grad_lse, b, h, i), 1, 1, &sum, 1);
      if (x.grad_out.present()) {
        load_row(x.out, at(x.out, b, h, i), x.out.stride[3], width, out.get(), 1);
        load_row(x.grad_out, at(x.grad_out, b, h, i), x.grad_out.stride[3], width, grad.get(), 1);
        for (std::int64_t d = 0; d < width; ++d) dot += double{out.get()[d]} * grad.get()[d];
      }
      of_lse[problem * rows + i] = sum;
      centre[problem * rows + i] = static_cast<T>(sum - dot);
    }
  });
}

}  // namespace

void attention_forward(const AttentionForward& x, const Launch& launch) {
  with_accumulator(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const LogSumExpRows<T> rows{static_cast<T*>(x.lse.data), static_cast<T*>(x.lse_low.data), {}};
    fold_forward<LogSumExp, T>({}, attention_problem(x), rows, x.out, launch.threads);
  });
}

void attention_backward(const AttentionBackward& x, const Launch& launch) {
  with_accumulator(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t count = x.q.size[0] * x.q.size[1] * x.q.size[2];
    Scratch<T> of_lse(count), centre(count);
    row_centres(x, launch.threads, of_lse.get(), centre.get());
    const LogSumExpRows<T> rows{
        static_cast<T*>(x.lse.data), static_cast<T*>(x.lse_low.data), {centre.get(), 1}, {of_lse.get(), 1}};
    FoldProblem problem = attention_problem(x);
    FoldGradients gradients{.grad_out = x.grad_out,
                            .d_a = x.d_q,
                            .d_b = x.d_k,
                            .d_other_a = {},
                            .d_other_b = {},
                            .d_payload = x.d_v,
                            .d_bias = x.d_bias};
    if (!x.grad_out.present()) {  // only lse was used: v has no part in it
      problem.payload = {};
      gradients.d_payload = {};
      fill_zero(x.d_v);
    }
    fold_backward<LogSumExp, T>({}, problem, rows, gradients, launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
