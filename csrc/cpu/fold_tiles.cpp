// Answers which tile sizes the CPU engine would use for a problem.
#include "engine.h"
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/operators.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

template <>
void run(const TileQuery& x, const Launch& launch) {
  const FoldProblem& p = x.problem;
  with_accumulator(p.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_operand<T>(p, {}, [&](auto* operand) {
      x.tiles.forward = forward_tile<T, std::remove_pointer_t<decltype(operand)>>(p);
    });
    x.tiles.backward = backward_tile<T>(p, threads_per_problem(p, x.bias_gradient, launch.threads));
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
