// Matrices and vectors as the operands of a fold.
//
// The functions are always inlined: the linker could otherwise pick an out-of-line copy compiled for AVX-512, and a baseline
// machine would run it.
#pragma once

#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// A [rows, width] matrix as [1, 1, rows, width].
[[gnu::always_inline]] inline TensorView as_rows(const TensorView& m) {
  if (!m.present()) return m;
  TensorView t = m;
  t.rank = 4;
  t.size[0] = t.size[1] = 1, t.size[2] = m.size[0], t.size[3] = m.size[1];
  t.stride[0] = t.stride[1] = 0, t.stride[2] = m.stride[0], t.stride[3] = m.stride[1];
  return t;
}

[[gnu::always_inline]] inline TensorView transposed(const TensorView& m) {
  TensorView t = m;
  if (!m.present()) return t;
  t.size[0] = m.size[1], t.size[1] = m.size[0];
  t.stride[0] = m.stride[1], t.stride[1] = m.stride[0];
  return t;
}

// A [columns] vector as a [1, 1, rows, columns] bias, the same for every row.
[[gnu::always_inline]] inline TensorView as_column_bias(const TensorView& v, std::int64_t rows) {
  if (!v.present()) return v;
  TensorView t = v;
  t.rank = 4;
  t.size[0] = t.size[1] = 1, t.size[2] = rows, t.size[3] = v.size[0];
  t.stride[0] = t.stride[1] = t.stride[2] = 0, t.stride[3] = v.stride[0];
  return t;
}

}  // namespace monoidreduce
