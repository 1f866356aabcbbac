// The scratch of attention's backward pass on tensor cores.
#pragma once

#include <cstdint>

#include "monoidreduce/operators.h"

namespace monoidreduce {

// Its parts, one behind the other on 16-byte boundaries: two residuals of rows,
// marks of rows and of columns, what blocks share, and turns.
struct BackwardParts {
  static constexpr int kCount = 6, kPadding = 128, kMarked = 64,
                       kInTurn = 8;                   // rows; rows of a mark, of a turn
  std::int64_t padded_rows, row_units, column_units;  // of a head
  std::int64_t floats[kCount];

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

}  // namespace monoidreduce
