// Makes the epilogue of device/contraction/gradient_epilogue.cuh for a problem.
#pragma once

#include "monoidreduce/device/contraction/gradient_epilogue.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce {

// An epilogue that stores dlogits: the derivatives with respect to the first kOuts dot products of each element, for a problem
// without a payload.
//   outs   [1, 1, rows, columns] each, of the element type, in the order of the rows. Rows that are not active are 0 or
//          not written.
//   sums   outs summed over groups of 16 rows (GradientEpilogue::sums), [rows / 16, columns] of whole tiles; or absent
template <class E, class Tile, int kOuts, class M, class Scores, class Rows>
auto gradient_epilogue(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows,
                       const TensorView (&outs)[kOuts], const TensorView& sums) {
  using Stores = typename Tile::template Stores<kOuts>;
  static_assert(Tile::kScratch == 0);
  const RowOrder order = row_order(p);
  return GradientEpilogue<E, M, Scores, Rows, Stores>{
      m,
      scores,
      rows,
      order,
      {static_cast<float*>(sums.data), sums.stride[0], order.rows},
      stores_for(Tile{}, outs)};
}

}  // namespace monoidreduce
