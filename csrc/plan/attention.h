// How the scratch of attention's backward pass on tensor cores is laid out.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/ops/planes.h"
#include "monoidreduce/plan.h"

namespace monoidreduce {

// The parts of the scratch, one behind the other on 16-byte boundaries: two residuals per row (lse, delta), marks of rows and
// of columns (repair.cuh), the memory through which blocks share jobs (JobSharing), and semaphores (semaphores.cuh).
struct BackwardParts {
  // Rows of a head are padded to a multiple of kPadding. There is a mark for kMarked rows and a semaphore for kInTurn rows.
  static constexpr int kCount = 6, kPadding = 128, kMarked = 64, kInTurn = 8;
  std::int64_t padded_rows, row_units, column_units;  // per head: padded rows; marks of rows, of columns
  std::int64_t floats[kCount];                        // size of each part

  template <class Call>
  BackwardParts(const Call& x, const JobSharing& sharing) {
    const std::int64_t heads = x.q.size[0] * x.q.size[1], column_heads = x.k.size[0] * x.k.size[1];
    padded_rows = (x.q.size[2] + kPadding - 1) / kPadding * kPadding;
    row_units = padded_rows / kMarked, column_units = (x.k.size[2] + kMarked - 1) / kMarked;
    floats[0] = floats[1] = heads * padded_rows;
    floats[2] = heads * row_units, floats[3] = column_heads * column_units;
    floats[4] = sharing.floats, floats[5] = sharing.in_turn ? 1 + heads * (padded_rows / kInTurn) : 0;
  }
};

// The widest float32 heads that kernels for planes take, and the widest of which one block has the whole width. Of wider
// ones each of the two blocks of a cluster has so much.
inline constexpr std::int64_t kWidestHeadsOfPlanes = 256, kWidestOfBlock = 128;
// The float16 numbers of a row in planes, which is a line for each block.
constexpr std::int64_t planes_of_head(std::int64_t width) {
  return width <= kWidestOfBlock ? planes_width(width) : 2 * planes_width(kWidestOfBlock);
}

// The same where float32 operands are read in planes: for each row its grad_lse and its centre, what kernels read of a row
// (PlaneResiduals), marks of rows and of columns, and the planes of q, k, v and grad_out.
struct PlanesParts {
  static constexpr int kCount = 5, kUnit = 64, kResiduals = 3;
  std::int64_t padded_rows, row_units, column_units, row_marks;
  std::int64_t floats[kCount];

  template <class Call>
  explicit PlanesParts(const Call& x) {
    const std::int64_t heads = x.q.size[0] * x.q.size[1], column_heads = x.k.size[0] * x.k.size[1];
    const auto whole = [](std::int64_t floats) { return (floats + 3) / 4 * 4; };
    row_units = (x.q.size[2] + kUnit - 1) / kUnit, column_units = (x.k.size[2] + kUnit - 1) / kUnit;
    // Kernels read those of whole tiles, of two units.
    padded_rows = (row_units + 1) / 2 * 2 * kUnit, row_marks = heads * row_units;
    floats[0] = floats[1] = whole(heads * x.q.size[2]);
    floats[2] = heads * padded_rows * kResiduals;
    floats[3] = whole(row_marks + column_heads * column_units);
    const std::int64_t lines = 2 * (heads * x.q.size[2] + column_heads * x.k.size[2]);
    floats[4] = lines * planes_of_head(std::max(x.q.size[3], x.v.size[3])) / 2;
  }
};

}  // namespace monoidreduce
