// What tensor-core kernels require of tensors (TMA-compatible): rows of adjacent elements on 16-byte boundaries.
#pragma once

#include <cstdint>

#include "monoidreduce/error.h"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// Throws unless lines are dense and 16-byte aligned. Axes before the last may be broadcast (stride 0).
inline void require_readable_lines(const TensorView& t) {
  bool readable = (t.stride[3] == 1 || t.size[3] == 1) && reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  for (int d = 0; d < 3; ++d)
    readable = readable && (t.size[d] <= 1 || t.stride[d] * item_size(t.dtype) % 16 == 0);
  if (!readable) throw Error("a tensor's rows are not dense, or not on 16-byte boundaries");
}
inline bool rows_share(const TensorView& t) { return t.size[2] > 1 && t.stride[2] == 0; }
// Whether several indices refer to one element.
inline bool repeats(const TensorView& t) {
  for (int d = 0; d < t.rank; ++d) {
    if (t.size[d] > 1 && t.stride[d] == 0) return true;
  }
  return false;
}
// Throws unless, besides, every element has its own place in memory.
inline void require_dense_lines(const TensorView& t) {
  require_readable_lines(t);
  bool dense = t.stride[3] == 1;
  for (int d = 0; d < 3; ++d) dense = dense && (t.size[d] <= 1 || t.stride[d] > 0);
  if (!dense) throw Error("a tensor's rows are not dense");
}

// [B, H, rows, width] as [B, H, width, rows].
inline TensorView transposed_rows(const TensorView& t) {
  TensorView u = t;
  u.size[2] = t.size[3], u.size[3] = t.size[2];
  u.stride[2] = t.stride[3], u.stride[3] = t.stride[2];
  return u;
}

}  // namespace monoidreduce
