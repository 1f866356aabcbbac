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

// counter: if rows keep different numbers of columns, a counter of jobs, which is cleared here; else null.
template <class E, class Tile, class M, class Scores, class Rows>
void fold_forward(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows,
                  const FoldOutput& out, unsigned long long* counter, const Launch& launch) {
  const std::int64_t row_tiles = (p.rows() + Tile::kRows - 1) / Tile::kRows, heads = p.batch() * p.heads();
  const FoldShape shape = fold_shape(
      p,
      section_of(p, p.columns() * (p.width() + p.payload_width()) * sizeof(E), p.heads() / p.column_heads()));
  const ForwardArguments arguments{.rows = tensor_map(p.a, kFragmentRows),
                                   .columns = tensor_map(p.b, Tile::kColumns),
                                   .payload = payload_map<Tile>(p.payload),
                                   .rounded = tensor_map(out.out, kWarpRows),
                                   .out = output_rows(out),
                                   .counter = counter,
                                   .shape = shape,
                                   .bias = bias_source<BiasElement<Scores>>(p.bias, kFragmentRows)};
  const DeviceGuard device(p.a.cuda_device);
  if (counter)
    check_cuda(cudaMemsetAsync(counter, 0, sizeof *counter, static_cast<cudaStream_t>(launch.stream)),
               "cudaMemsetAsync for fold_forward_sm90");
  launch_kernel(
      "fold_forward_sm90", &fold_forward_kernel<E, Tile, M, Scores, Rows>,
      static_cast<unsigned>(std::min<std::int64_t>(heads * row_tiles, multiprocessors(p.a.cuda_device))),
      Tile::kThreads, sizeof(ForwardMemory<Tile, BiasElement<Scores>, RowJob>) + kSharedAlignment,
      launch.stream, arguments, m, scores, rows);
}

}  // namespace monoidreduce::sm90
