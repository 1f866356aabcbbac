// From a tensor's type to the type that the CPU engine computes in.
#pragma once

#include "monoidreduce/cpu/tiles.h"
#include "monoidreduce/rows.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// f(0.0) for float64 tensors, f(0.0f) for all others.
template <class F>
void with_accumulator(DType dtype, F f) {
  if constexpr (!kBFloat16Alone) {
    if (dtype == DType::kFloat64) return f(0.0);
  }
  f(0.0f);
}

// A contiguous tensor, or none.
inline void fill_zero(const TensorView& t) {
  if (t.present()) std::memset(t.data, 0, static_cast<std::size_t>(t.numel() * item_size(t.dtype)));
}

// A row statistic of the accumulation type, or none: it reads as 0.
template <class T>
auto row_vector(const TensorView& t) {
  return t.present() ? RowVector<T>{static_cast<T*>(t.data), t.stride[0]} : RowVector<T>{};
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
