// Launches device/resident/fold_backward_sm80.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/resident/fold_backward_sm80.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce::sm80 {

// The number of blocks that share the rows of a column tile, if there are fewer column tiles than blocks that run at a time.
// Only for floats, because blocks must be able to add to the columns' gradients. Each part has at least a few row tiles.
template <class E, class Tile>
std::int64_t parts_of_rows(const FoldProblem& p, std::int64_t tiles, const DeviceFacts& gpu) {
  if (!std::is_same_v<E, float>) return 1;
  constexpr int kLeast = 4;
  const std::int64_t blocks = gpu.multiprocessors * Tile::kBlocks,
                     row_tiles = (p.rows() + Tile::kRows - 1) / Tile::kRows;
  return std::max(std::min(blocks / tiles, row_tiles / kLeast), std::int64_t{1});
}

// The shape of the problem. In the deterministic mode (`turns` has semaphores) a section has twice as many heads as have room
// in the cache for their gradients. So half as many column tiles of one head run at a time, and the last of them waits half
// as long before it adds for the first time.
inline FoldShape backward_shape(const FoldProblem& p, const RowSemaphores& turns) {
  const std::int64_t bytes = p.rows() * p.width() * sizeof(float) * (p.heads() / p.column_heads());
  return fold_shape(p, section_of(p, turns.words ? bytes / 2 : bytes, 1));
}

template <class Tile>
std::int64_t backward_tiles(const FoldProblem& p) {
  return p.batch() * p.column_heads() * ((p.columns() + Tile::kColumns - 1) / Tile::kColumns);
}

// The kernel's arguments, from those of fold_backward.
template <class Tile>
BackwardArguments backward_arguments(const FoldProblem& p, const FoldGradients& wanted,
                                     const RowResiduals& residuals, const RowMarks& marks,
                                     const RowSemaphores& turns, std::int64_t parts) {
  const auto payload_lines = [](const TensorView& t) {
    return strided_lines(Tile::kTransposed ? transposed_rows(t) : t);
  };
  return {.rows = strided_lines(p.a),
          .grad_out = strided_lines(wanted.grad_out),
          .columns = strided_lines(p.b),
          .payload = payload_lines(p.payload),
          .d_columns = strided_lines(wanted.d_b),
          .d_payload = payload_lines(wanted.d_payload),
          .d_rows = static_cast<float*>(wanted.d_a.data),
          .d_column_bias = static_cast<float*>(wanted.d_bias.data),
          .residuals = residuals,
          .marks = marks,
          .turns = turns,
          .shape = backward_shape(p, turns),
          .parts = static_cast<int>(parts)};
}

// wanted: grad_out, and the gradients of rows (float, added to), columns and payload (element type E, written, contiguous); all
// must be present. residuals, marks and turns: as prepare_rows (row_residuals.cuh) left them.
template <class E, class Tile, class M, class Scores>
void fold_backward(const M& m, const Scores& scores, const FoldProblem& p, const FoldGradients& wanted,
                   const RowResiduals& residuals, const RowMarks& marks, const RowSemaphores& turns,
                   const Launch& launch) {
  const std::int64_t tiles = backward_tiles<Tile>(p);
  const std::int64_t parts =
      turns.words ? 1 : parts_of_rows<E, Tile>(p, tiles, device_facts(p.a.cuda_device));
  const DeviceGuard device(p.a.cuda_device);
  if (parts > 1) {
    for (const TensorView* t : {&wanted.d_b, &wanted.d_payload})
      check_cuda(
          cudaMemsetAsync(t->data, 0, t->numel() * sizeof(E), static_cast<cudaStream_t>(launch.stream)),
          "cudaMemsetAsync for fold_backward_sm80");
  }
  launch_kernel("fold_backward_sm80", &fold_backward_kernel<E, Tile, M, Scores>, blocks_for(tiles * parts),
                Tile::kThreads, sizeof(BackwardMemory<E, Tile>), launch.stream,
                backward_arguments<Tile>(p, wanted, residuals, marks, turns, parts), m, scores);
}

}  // namespace monoidreduce::sm80
