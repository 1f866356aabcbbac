// Attention with a user's score_mod and mask_mod on the CPU: attention's folds, with scores from the interpreter.
#include "monoidreduce/ops/modified_attention.h"

#include "engine.h"
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/cpu/modified_scores.h"
#include "row_centres.h"
#include "sink_gradient.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {
namespace {

template <class T, class Call>
Program<T> scores_program(const Call& x) {
  return Program<T>(std::get<std::string>(x.program), Tables<T>(x.table, x.table_index), x.q.size[0],
                    x.q.size[1], x.q.size[2]);
}
template <class T, class Call>
ModifiedScores<T> modified_scores(const Program<T>& program, const Call& x) {
  return {&program, {&x.blocks, x.options.block_rows, x.options.block_columns}, x.options.scale};
}

}  // namespace

template <>
void run(const ModifiedAttentionForward& x, const Launch& launch) {
  with_accumulator(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Program<T> program = scores_program<T>(x);
    const ModifiedScores<T> scores = modified_scores(program, x);
    const FoldProblem problem = modified_problem(x);
    if (x.options.weights)
      return fold_forward<ModifiedSum, T>({{}, scores}, problem, SumRows<T>{}, {x.out, x.out_low},
                                          launch.threads);
    const LogSumExpRows<T> rows{.lse = static_cast<T*>(x.lse.data),
                                .lse_low = static_cast<T*>(x.lse_low.data),
                                .centre = {},
                                .sinks = static_cast<const T*>(x.sinks.data)};
    fold_forward<ModifiedLogSumExp, T>({{}, scores}, problem, rows, {x.out, x.out_low}, launch.threads);
  });
}

template <>
void run(const ModifiedAttentionBackward& x, const Launch& launch) {
  with_accumulator(x.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Program<T> program = scores_program<T>(x);
    const ModifiedScores<T> scores = modified_scores(program, x);
    FoldProblem problem = modified_problem(x);
    FoldGradients gradients{.grad_out = x.grad_out,
                            .d_a = x.d_q,
                            .d_b = x.d_k,
                            .d_other_a = {},
                            .d_other_b = {},
                            .d_payload = x.d_v,
                            .d_bias = {}};
    if (x.options.weights)
      return fold_backward<ModifiedSum, T>({{}, scores}, problem, SumRows<T>{}, gradients, launch.threads);
    const std::int64_t count = x.q.size[0] * x.q.size[1] * x.q.size[2];
    Scratch<T> of_lse(count), centre(count);
    row_centres<T>(x.grad_out, x.grad_lse, x.out, x.out_low, launch.threads, of_lse.get(), centre.get());
    const LogSumExpRows<T> rows{
        static_cast<T*>(x.lse.data), static_cast<T*>(x.lse_low.data), {centre.get(), 1}, {of_lse.get(), 1}};
    sink_gradient<T>(rows, x, launch.threads);
    if (!x.grad_out.present()) {  // only lse has a gradient, and lse does not depend on v
      problem.payload = {};
      gradients.d_payload = {};
      fill_zero(x.d_v);
    }
    fold_backward<ModifiedLogSumExp, T>({{}, scores}, problem, rows, gradients, launch.threads);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
