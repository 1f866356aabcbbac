// Launches device/resident/fold_backward_sm90.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/resident/fold_backward_sm90.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensor_map.cuh"

namespace monoidreduce::sm90 {

// The kernel's arguments, from those of fold_backward. B: element type of the score biases, or void. even: whether all column
// tiles have equally many unmasked rows.
//
//   wanted             grad_out, and the gradients of rows (float, added to, if Tile::kAddsRows), columns and payload (element
//                      type E, written). All must be present; the rows' only if Tile::kAddsRows.
//   residuals, marks   as prepare_rows (row_residuals.cuh) left them; so are turns, in the deterministic mode
//   sharing            16-byte aligned. The ColumnFixup of the partial sums of split jobs (job_split.h). Behind it, if column
//                      tiles are not even, an atomic counter of jobs, 0 at first. Not read in the deterministic mode.
template <class E, class Tile, class B>
BackwardArguments<Tile> backward_arguments(const FoldProblem& p, bool even, const FoldGradients& wanted,
                                           const RowResiduals& residuals, const RowMarks& marks,
                                           const RowSemaphores& turns, float* sharing) {
  // Jobs are ordered longest first, within sections of heads. The rows of a section stay in the cache together with grad_out
  // and d_rows, which is float. (Whole backward pass, causal, width 128, 16k tokens in sequences of 1k, 2k, 4k and 8k: 301,
  // 416, 487 and 538 TFLOP/s. With sections twice as large: 253, 402, 485 and 540. In another run with 8k: 569 with sections
  // twice as large, 550 with one head at a time, 542 with all heads at once.)
  const std::int64_t row_bytes = (p.width() + p.payload_width()) * sizeof(E) +
                                 (Tile::kAddsRows ? p.width() * sizeof(float) : std::size_t{0});
  const std::int64_t group_bytes = p.rows() * row_bytes * (p.heads() / p.column_heads());
  // In the deterministic mode a section has several heads, at least kLeast, even if all jobs are equally long. The more column
  // tiles of one head wait for each other, the more each delay costs. (Measured when jobs were split as well: 16k tokens, 2
  // heads 11.2 ms, 4 heads 10.6, 8 heads 10.9; 8k tokens, 4 heads 5.1, 8 heads 5.2.)
  constexpr std::int64_t kLeast = 4;
  const std::int64_t heads_in_turn =
      std::min(std::max(cached_heads(p, group_bytes, 1), kLeast), p.batch() * p.heads());
  const FoldShape shape = fold_shape(p, Tile::kInTurn ? heads_in_turn : section_of(p, group_bytes, 1));
  const DeviceFacts& gpu = device_facts(p.a.cuda_device);
  constexpr TileSize kTile{Tile::kRows, Tile::kColumns};
  const JobSplit split = Tile::kHasParts ? backward_job_split(kTile, p, even, gpu) : JobSplit{};
  const ColumnFixup<Tile> fixup(sharing, split.slots);
  unsigned* const counter = Tile::kInTurn ? turns.words : even ? nullptr : fixup.end();
  const JobNumbers jobs(column_jobs(kTile, p), split.parts, split.tail, counter);
  return {.rows = tensor_map(p.a, Tile::kRows),
          .grad_out = tensor_map(wanted.grad_out, Tile::kRows),
          .columns = tensor_map(p.b, Tile::kColumns),
          .payload = Tile::kTransposed ? tensor_map(transposed_rows(p.payload), Tile::kWidth)
                                       : tensor_map(p.payload, Tile::kColumns),
          .d_rows = Tile::kAddsRows ? tensor_map(wanted.d_a, Tile::kSharedRows) : arch::TensorMap{},
          .d_columns = tensor_map(wanted.d_b, kFragmentRows),
          .d_payload = Tile::kTransposed ? tensor_map(transposed_rows(wanted.d_payload), Tile::kWidth)
                                         : tensor_map(wanted.d_payload, kFragmentRows),
          .d_column_bias = static_cast<float*>(wanted.d_bias.data),
          .residuals = residuals,
          .marks = marks,
          .turns = turns,
          .shape = shape,
          .jobs = jobs,
          .fixup = fixup,
          .bias = bias_source<B>(p.bias, Tile::kRows)};
}
template <class Tile>
unsigned backward_blocks(const JobNumbers& jobs, int cuda_device) {
  return Tile::kStays ? jobs.blocks(multiprocessors(cuda_device)) : blocks_for(jobs.before_tail);
}
template <class Tile, class B>
inline constexpr std::size_t kBackwardBytes = sizeof(BackwardMemory<Tile, B>) + kSharedAlignment;

template <class E, class Tile, class M, class Scores>
void fold_backward(const M& m, const Scores& scores, const FoldProblem& p, const FoldGradients& wanted,
                   const RowResiduals& residuals, const RowMarks& marks, const RowSemaphores& turns,
                   float* sharing, const Launch& launch) {
  using B = BiasElement<Scores>;
  const auto arguments =
      backward_arguments<E, Tile, B>(p, p.range.all(), wanted, residuals, marks, turns, sharing);
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("fold_backward_sm90", &fold_backward_kernel<E, Tile, M, Scores>,
                backward_blocks<Tile>(arguments.jobs, p.a.cuda_device), Tile::kThreads,
                kBackwardBytes<Tile, B>, launch.stream, arguments, m, scores);
}

}  // namespace monoidreduce::sm90
