// Launches device/contraction/gradient_epilogue.cuh.
#pragma once

#include "monoidreduce/device/contraction/gradient_epilogue.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/contraction_schedule.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce {

// The derivatives with respect to the first kOuts dot products of each element, for a problem without a payload.
//   outs   [1, 1, rows, columns] each, of the element type, in the order of the rows. Rows that are not active are 0 or
//          not written.
//   sums   GradientEpilogue::sums, [rows / 16, columns] of whole tiles; or absent
template <class E, class Tile, int kOuts, class M, class Scores, class Rows>
void local_gradient(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows,
                    const TensorView (&outs)[kOuts], const TensorView& sums, const Launch& launch) {
  using Stores = typename Tile::template Stores<kOuts>;
  const RowOrder order = row_order(p);
  const GradientEpilogue<E, M, Scores, Rows, Stores> epilogue{
      m,
      scores,
      rows,
      order,
      {static_cast<float*>(sums.data), sums.stride[0], order.rows},
      stores_for(Tile{}, outs)};
  static_assert(Tile::kScratch == 0);
  const TileSchedule schedule = contraction_schedule(kSizesOf<Tile>, p, device_facts(p.a.cuda_device));
  contraction<E>(Tile{}, schedule, p, epilogue, nullptr, "local_gradient", launch);
}

}  // namespace monoidreduce
