// The sum or mean of the losses of tokens on the CPU.
#include <algorithm>

#include "engine.h"
#include "monoidreduce/ops/rows.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

template <>
void run(const LossReduction& x, const Launch&) {
  with_accumulator(x.losses.dtype, [&](auto zero) {
    using T = decltype(zero);
    const ActiveTokens counted(x);
    const auto* losses = static_cast<const T*>(x.losses.data);
    double sum = 0;  // for float32 losses too, because a long sum in float32 would lose digits
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < x.losses.size[0]; ++i) {
      if (counted(i)) sum += losses[i], ++count;
    }
    *static_cast<T*>(x.reduced.data) =
        static_cast<T>(x.mean ? sum / static_cast<double>(std::max<std::int64_t>(count, 1)) : sum);
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
