// Launches device/contraction/payload_epilogue.cuh.
#pragma once

#include "monoidreduce/device/contraction/payload_epilogue.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce {

// Stores the weights of all elements (the hidden values of an MLP). For a problem with a second product, which is the
// derivative with respect to a weight, also stores the derivative with respect to the first product.
//   outs   [1, 1, rows, columns] each, of the element type
//   sums   the derivatives summed over groups of 16 rows, [rows / 16, columns] of whole tiles; or absent
template <class E, class Tile, class M, class Scores>
void payload_weights(const M& m, const Scores& scores, const FoldProblem& p,
                     const TensorView (&outs)[Tile::kScores], const TensorView& sums, const Launch& launch) {
  using Stores = typename Tile::template Stores<Tile::kScores>;
  const PayloadEpilogue<E, M, Scores, Stores> epilogue{
      m,
      scores,
      {static_cast<float*>(sums.data), sums.stride[0], static_cast<int>(p.rows())},
      stores_for(Tile{}, outs)};
  static_assert(Tile::kScratch == 0);
  contraction<E>(Tile{}, p, epilogue, nullptr, "payload_weights", launch);
}

}  // namespace monoidreduce
