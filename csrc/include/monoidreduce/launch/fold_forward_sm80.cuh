// Launches device/resident/fold_forward_sm80.cuh.
#pragma once

#include <cstdint>

#include "monoidreduce/device/resident/fold_forward_sm80.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/combine_splits.cuh"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce::sm80 {

template <class E>
FoldShape forward_shape(const FoldProblem& p) {
  return fold_shape(p, section_of(p, p.columns() * (p.width() + p.payload_width()) * sizeof(E),
                                  p.heads() / p.column_heads()));
}

template <class Tile>
ForwardArguments forward_arguments(const FoldProblem& p, const FoldShape& shape, const FoldOutput& out) {
  return {.rows = strided_lines(p.a),
          .columns = strided_lines(p.b),
          .payload = strided_lines(Tile::kTransposed ? transposed_rows(p.payload) : p.payload),
          .out = output_rows(out),
          .shape = shape};
}
template <class Tile>
unsigned forward_blocks(const FoldProblem& p) {
  const std::int64_t row_tiles = (p.rows() + Tile::kRows - 1) / Tile::kRows;
  return static_cast<unsigned>(p.batch() * p.heads() * row_tiles);
}

// Rows: as the kernel takes them. splits: the number of blocks among which the columns of a row tile are split.
template <class E, class Tile, class M, class Scores, class Rows>
void launch_forward(const M& m, const Scores& scores, const FoldProblem& p, const FoldShape& shape,
                    int splits, const Rows& rows, const FoldOutput& out, const Launch& launch) {
  launch_kernel("fold_forward_sm80", &fold_forward_kernel<E, Tile, M, Scores, Rows>,
                forward_blocks<Tile>(p) * splits, Tile::kThreads, sizeof(ForwardMemory<E, Tile>),
                launch.stream, forward_arguments<Tile>(p, shape, out), m, scores, rows);
}

// Rows: as finish_rows (row_fragment.cuh) takes them.
template <class E, class Tile, class M, class Scores, class Rows>
void fold_forward(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows,
                  const FoldOutput& out, const Launch& launch) {
  const DeviceGuard device(p.a.cuda_device);
  launch_forward<E, Tile>(m, scores, p, forward_shape<E>(p), 1, rows, out, launch);
}

// The same for few rows, with the columns in several splits (split-KV). scratch: for PartialRows. Rows: as combine_splits takes
// them.
template <class E, class Tile, class M, class Scores, class Rows>
void fold_few_rows(const M& m, const Scores& scores, const FoldProblem& p, int splits, const Rows& rows,
                   const FoldOutput& out, float* scratch, const Launch& launch) {
  const FoldShape shape = forward_shape<E>(p);
  const PartialRows<M> partial = partial_rows<M>(p, splits, scratch);
  const DeviceGuard device(p.a.cuda_device);
  launch_forward<E, Tile>(m, scores, p, shape, splits, RowSplits<M>{partial, splits}, out, launch);
  combine_splits<E>(m, partial, splits, shape, rows, output_rows(out), launch);
}

}  // namespace monoidreduce::sm80
