// The elementwise work between the matrix products of a gated MLP, on the CPU.
#include "monoidreduce/ops/gated_mlp.h"

#include "engine.h"
#include "monoidreduce/cpu/thread_pool.h"
#include "monoidreduce/operators.h"
#include "with_accumulator.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

namespace {

// Applies f in place to the elements of several arrays of the same length: to one pack (SIMD vector) of each at a time.
template <class T, int kArrays, class F>
void in_packs(T* const (&arrays)[kArrays], std::int64_t count, int threads, F f) {
  constexpr std::int64_t kLane = kLanes<T>, kTask = 1024 * kLane;
  parallel_for(threads, (count + kTask - 1) / kTask, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(count, (task + 1) * kTask);
    for (std::int64_t i = task * kTask; i < end; i += kLane) {
      Pack<T, kLanes<T>> packs[kArrays] = {};
      const std::size_t bytes = static_cast<std::size_t>(std::min(kLane, end - i)) * sizeof(T);
      for (int n = 0; n < kArrays; ++n) std::memcpy(&packs[n].v, arrays[n] + i, bytes);
      f(packs);
      for (int n = 0; n < kArrays; ++n) std::memcpy(arrays[n] + i, &packs[n].v, bytes);
    }
  });
}

template <class T>
T* data(const TensorView& t) {
  return static_cast<T*>(t.data);
}

}  // namespace

template <>
void run(const GatedHidden& x, const Launch& launch) {
  with_accumulator(x.gate.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_activation(x.activation, [&](auto activation) {
      using R = Pack<T, kLanes<T>>;
      T* const arrays[] = {data<T>(x.gate), data<T>(x.up)};
      in_packs(arrays, x.gate.numel(), launch.threads,
               [](R(&unit)[2]) { unit[1] = GatedUnit<decltype(activation), R>{unit[0], unit[1]}.hidden(); });
    });
  });
}

template <>
void run(const GatedGradient& x, const Launch& launch) {
  with_accumulator(x.gate.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_activation(x.activation, [&](auto activation) {
      using R = Pack<T, kLanes<T>>;
      T* const arrays[] = {data<T>(x.gate), data<T>(x.up), data<T>(x.hidden)};
      in_packs(arrays, x.gate.numel(), launch.threads, [](R(&of)[3]) {
        GatedUnit<decltype(activation), R> unit{of[0], of[1]};
        of[2] = unit.pull(of[2]);
        of[0] = unit.gate, of[1] = unit.up;
      });
    });
  });
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
