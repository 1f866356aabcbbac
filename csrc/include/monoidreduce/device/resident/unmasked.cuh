// Finds which elements of a fragment are kept (not masked): those within a band (causal or sliding window) or
// within listed spans (packed sequences).
#pragma once

#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"

namespace monoidreduce {

// For a fragment whose 64 lines are rows of the fold: the columns that the thread's two rows keep.
// row_of(line): the row of a line of the fragment.
template <class RowOf>
__device__ __forceinline__ void find_unmasked_columns(Kept (&kept)[2], const FoldShape& shape, RowOf row_of,
                                                      int column0) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(fragment_row(r)), begin = shape.first_column(row);
    kept[r] = {begin - column0 - fragment_column(0),
               static_cast<unsigned>(::max(shape.end_column(row) - begin, 0))};
  }
}

// For a fragment whose 64 lines are columns of the fold: the rows that keep the thread's two columns.
__device__ __forceinline__ void find_unmasked_rows(Kept (&kept)[2], const FoldShape& shape, int row0,
                                                   int column0) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int column = column0 + fragment_row(r);
    kept[r] = {shape.first_row(column) - row0 - fragment_column(0),
               column < shape.columns ? shape.rows_of(column) : 0};
  }
}

}  // namespace monoidreduce
