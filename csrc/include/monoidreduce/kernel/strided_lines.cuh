// Tensors [batch, heads, lines, width], as kernels without TMA read and write them.
#pragma once

#include "monoidreduce/block/copy_tile.cuh"
#include "monoidreduce/kernel/dense_lines.cuh"
#include "monoidreduce/math.h"

namespace monoidreduce {

struct StridedLines {
  char* data;
  std::int64_t stride[3];  // bytes
  int count, width;

  explicit StridedLines(const TensorView& t)
      : data(static_cast<char*>(t.data)),
        stride{t.stride[0] * item_size(t.dtype), t.stride[1] * item_size(t.dtype),
               t.stride[2] * item_size(t.dtype)},
        count(static_cast<int>(t.size[2])),
        width(static_cast<int>(t.size[3])) {
    require_dense_lines(t);
  }
  MR_HD Lines head(int batch, int head) const {
    return {data + batch * stride[0] + head * stride[1], stride[2], count, width};
  }
};

}  // namespace monoidreduce
