// Launches device/resident/fold_forward_sm90.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/resident/fold_forward_sm90.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensor_map.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce::sm90 {

template <class Tile>
arch::TensorMap payload_map(const TensorView& payload) {
  return Tile::kTransposed ? tensor_map(transposed_rows(payload), Tile::kPayloadWidth)
                           : tensor_map(payload, Tile::kColumns);
}

// B: element type of the score biases, or void. counter: of jobs, atomic, which this function clears; null if no block has more
// than one job, or all rows have equally many unmasked columns.
template <class E, class Tile, class B>
ForwardArguments forward_arguments(const FoldProblem& p, const FoldOutput& out, unsigned long long* counter,
                                   const Launch& launch) {
  if (counter)
    check_cuda(cudaMemsetAsync(counter, 0, sizeof *counter, static_cast<cudaStream_t>(launch.stream)),
               "cudaMemsetAsync for fold_forward_sm90");
  return {.rows = tensor_map(p.a, kFragmentRows),
          .columns = tensor_map(p.b, Tile::kColumns),
          .payload = payload_map<Tile>(p.payload),
          .rounded = tensor_map(out.out, kWarpRows),
          .out = output_rows(out),
          .counter = counter,
          .shape = fold_shape(p, section_of(p, p.columns() * (p.width() + p.payload_width()) * sizeof(E),
                                            p.heads() / p.column_heads())),
          .bias = bias_source<B>(p.bias, kFragmentRows)};
}
template <class Tile>
unsigned forward_blocks(const FoldProblem& p) {
  const std::int64_t row_tiles = (p.rows() + Tile::kRows - 1) / Tile::kRows;
  return static_cast<unsigned>(
      std::min<std::int64_t>(p.batch() * p.heads() * row_tiles, multiprocessors(p.a.cuda_device)));
}
// `false`: without a block mask. A block mask changes which threads free a stage of columns, but not the size of the memory.
template <class Tile, class B>
inline constexpr std::size_t kForwardBytes = sizeof(ForwardMemory<Tile, B, false, RowJob>) + kSharedAlignment;

// A fold without masks, and without a bias per score.
template <class E, class Tile, class M, class Scores, class Rows>
void fold_forward(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows,
                  const FoldOutput& out, const Launch& launch) {
  static_assert(!kBiasedByTile<Scores>);
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("fold_forward_sm90", &fold_forward_kernel<E, Tile, M, Scores, Rows>, forward_blocks<Tile>(p),
                Tile::kThreads, kForwardBytes<Tile, void>, launch.stream,
                forward_arguments<E, Tile, void>(p, out, nullptr, launch), m, scores, rows);
}

}  // namespace monoidreduce::sm90
