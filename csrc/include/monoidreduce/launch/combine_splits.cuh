// Launches device/resident/combine_splits.cuh.
#pragma once

#include <cstdint>

#include "monoidreduce/device/resident/combine_splits.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"

namespace monoidreduce {

// Lays out the results of splits in scratch, which has partial_rows_floats() floats (packing.h).
template <PayloadMonoid M>
PartialRows<M> partial_rows(const FoldProblem& p, int splits, float* scratch) {
  const std::int64_t rows = p.batch() * p.heads() * p.rows(), width = p.payload_width();
  return {scratch, reinterpret_cast<typename M::State*>(scratch + splits * rows * width), rows,
          static_cast<int>(width)};
}

template <class E, class M, class Rows>
void combine_splits(const M& m, const PartialRows<M>& from, int splits, const FoldShape& shape,
                    const Rows& rows, const OutputRows& out, const Launch& launch) {
  launch_kernel("combine_splits", &combine_splits_kernel<E, M, Rows>, static_cast<unsigned>(from.rows),
                32 * kCombiningWarps, 0, launch.stream, m, from, splits, shape, rows, out);
}

}  // namespace monoidreduce
