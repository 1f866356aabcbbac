// How SIMT kernels split columns. A block folds 64 rows. With few rows, most multiprocessors would have no
// block. So several blocks may share the columns of the same rows. Each stores its states, and a second kernel
// combines them, always in the same order.
#pragma once

#include "monoidreduce/device/block/tile.cuh"

namespace monoidreduce::simt {

// partial: [splits, rows of all batches and heads] states, if there are several splits.
struct Splits {
  std::int64_t count = 1;
  void* partial = nullptr;

  // Leaves the columns [begin, end) that split number `split` has of these. They start on a tile.
  __device__ void take(std::int64_t& begin, std::int64_t& end, std::int64_t split) const {
    const std::int64_t share = divide_up(divide_up(end - begin, std::int64_t{kTile}), count) * kTile;
    begin += split * share;
    end = min(end, begin + share);
  }
};

}  // namespace monoidreduce::simt
