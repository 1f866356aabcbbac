// Dispatches from the dtype of a tensor to the type that the CPU engine computes in.
#pragma once

#include "monoidreduce/cpu/tiles.h"
#include "monoidreduce/rows.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// Calls f(0.0) for float64, f(0.0f) for all other dtypes.
template <class F>
void with_accumulator(DType dtype, F f) {
  if constexpr (!kOnlyBFloat16) {
    if (dtype == DType::kFloat64) return f(0.0);
  }
  f(0.0f);
}

// Sets a contiguous tensor to 0; it may be absent.
inline void fill_zero(const TensorView& t) {
  if (t.present() && t.numel())
    std::memset(t.data, 0, static_cast<std::size_t>(t.numel() * item_size(t.dtype)));
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
