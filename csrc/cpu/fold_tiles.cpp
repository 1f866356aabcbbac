// The sizes of the tiles that a problem is folded in, for those who ask before a call.
#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/operators.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

CpuTiles fold_tiles(const FoldProblem& p, bool bias_gradient, int threads) {
  CpuTiles tiles;
  with_accumulator(p.a.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_operand<T>(p, {}, [&](auto* operand) {
      tiles.forward = forward_tile<T, std::remove_pointer_t<decltype(operand)>>(p);
    });
    tiles.backward = backward_tile<T>(p, threads_a_problem(p, bias_gradient, threads));
  });
  return tiles;
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
