// Converts the host's tensor views to the forms in which kernels take tensors.
#pragma once

#include <cstdint>

#include "monoidreduce/device/block/matrix.cuh"
#include "monoidreduce/device/contraction/row_order.cuh"
#include "monoidreduce/device/resident/row_fragment.cuh"
#include "monoidreduce/device/resident/strided_lines.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/dense_lines.h"

namespace monoidreduce {

inline Tensor device_tensor(const TensorView& t) {
  Tensor to{.data = static_cast<char*>(t.data), .dtype = t.dtype};
  for (int axis = 0; axis < 4; ++axis) {
    const int own = axis + t.rank - 4;  // axes that a lower rank lacks are in front, of size 1
    to.size[axis] = own < 0 ? 1 : t.size[own];
    to.stride[axis] = own < 0 ? 0 : t.stride[own] * item_size(t.dtype);
  }
  return to;
}

inline StridedLines strided_lines(const TensorView& t) {
  require_dense_lines(t);
  const std::int64_t bytes = item_size(t.dtype);
  return {static_cast<char*>(t.data),
          {t.stride[0] * bytes, t.stride[1] * bytes, t.stride[2] * bytes},
          static_cast<int>(t.size[2]),
          static_cast<int>(t.size[3])};
}

inline OutputRows output_rows(const FoldOutput& to) {
  const TensorView& t = to.out;
  if (to.low.present()) {
    for (int axis = 0; axis < 4; ++axis)
      require(to.low.stride[axis] == t.stride[axis], "out_low: expected the strides of out");
  }
  return {t.data, to.low.data, {t.stride[0], t.stride[1], t.stride[2]}, static_cast<int>(t.size[3])};
}

// order: FoldProblem::order. rows: how many of its places the kernel takes, from `first` on.
inline RowOrder row_order(const TensorView& order, std::int64_t rows, std::int64_t first = 0) {
  const auto* const places = static_cast<const std::int64_t*>(order.data);
  return {places ? places + first : nullptr, places ? places + (order.size[0] - 1) : nullptr,
          static_cast<int>(rows), static_cast<int>(first)};
}
inline RowOrder row_order(const FoldProblem& p) { return row_order(p.order, p.rows(), p.first_place); }

}  // namespace monoidreduce
