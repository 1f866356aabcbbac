// Tensors [batch, heads, lines, width] as kernels without TMA read and write them.
#pragma once

#include "monoidreduce/device/block/copy_tile.cuh"
#include "monoidreduce/math.h"

namespace monoidreduce {

struct StridedLines {
  char* data;
  std::int64_t stride[3];  // bytes
  int count, width;

  MR_HD Lines head(int batch, int head) const {
    return {data + batch * stride[0] + head * stride[1], stride[2], count, width};
  }
};

}  // namespace monoidreduce
