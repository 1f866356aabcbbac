// Launches device/resident/fold_backward_pass_sm90.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/resident/fold_backward_pass_sm90.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensor_map.cuh"

namespace monoidreduce::sm90 {

// The arguments of the pass for the gradient of Tile::kOf; without blocks if nobody wants it.
template <class E, class Tile>
PassArguments pass_arguments(const FoldProblem& p, const FoldGradients& wanted, const RowResiduals& residuals,
                             const RowMarks& marks) {
  const std::int64_t group = p.heads() / p.column_heads(), lines = Tile::kOfRows ? p.rows() : p.columns();
  const std::int64_t heads = Tile::kOfRows ? p.heads() : p.column_heads();
  // How many lines stream past those that stay, per head. If rows stay, a group of query heads shares the columns.
  const std::int64_t streamed_bytes = Tile::kOfRows ? p.columns() : p.rows() * group;
  const FoldShape shape = fold_shape(
      p,
      section_of(p, streamed_bytes * (p.width() + p.payload_width()) * sizeof(E), Tile::kOfRows ? group : 1));
  const auto payload = [](const TensorView& t, int lines_of_box) {
    return Tile::kTransposed ? tensor_map(transposed_rows(t), Tile::kWidth) : tensor_map(t, lines_of_box);
  };
  PassArguments arguments{.blocks = 0,
                          .staying = {},
                          .streamed = {},
                          .gradient = {},
                          .d_column_bias = static_cast<float*>(wanted.d_bias.data),
                          .residuals = residuals,
                          .marks = marks,
                          .shape = shape};
  const TensorView* const gradients[] = {&wanted.d_a, &wanted.d_b, &wanted.d_payload};
  if (!gradients[static_cast<int>(Tile::kOf)]->present()) return arguments;
  arguments.blocks =
      static_cast<int>(blocks_for(p.batch() * heads * ((lines + Tile::kStaying - 1) / Tile::kStaying)));
  if constexpr (Tile::kOfRows) {
    arguments.staying[0] = tensor_map(p.a, Tile::kStaying);
    arguments.staying[1] = tensor_map(wanted.grad_out, Tile::kStaying);
    arguments.streamed[0] = tensor_map(p.b, Tile::kStreamed);
    arguments.streamed[1] = payload(p.payload, Tile::kStreamed);
    arguments.gradient = tensor_map(wanted.d_a, kFragmentRows);
  } else {
    arguments.staying[0] = tensor_map(p.b, Tile::kStaying);
    arguments.staying[1] = payload(p.payload, Tile::kStaying);
    arguments.streamed[0] = tensor_map(p.a, Tile::kStreamed);
    arguments.streamed[1] = tensor_map(wanted.grad_out, Tile::kStreamed);
    arguments.gradient =
        Tile::kOfPayload ? payload(wanted.d_payload, kFragmentRows) : tensor_map(wanted.d_b, kFragmentRows);
  }
  return arguments;
}

// Writes the gradients of Tiles::kOf that are wanted, in the element type. The pass for the columns' gradient also writes
// that of a bias per column, if there is one. residuals and marks: as prepare_rows (row_residuals.cuh) left them.
template <class E, class... Tiles, class M, class Scores>
void fold_backward_pass(const M& m, const Scores& scores, const FoldProblem& p, const FoldGradients& wanted,
                        const RowResiduals& residuals, const RowMarks& marks, const Launch& launch) {
  const DeviceGuard device(p.a.cuda_device);
  const PassesArguments<Tiles...> arguments{{pass_arguments<E, Tiles>(p, wanted, residuals, marks)...}};
  std::int64_t blocks = 0;
  for (const PassArguments& pass : arguments.passes) blocks += pass.blocks;
  constexpr std::size_t kBytes = std::max({sizeof(typename PassConsumer<E, Tiles, M, Scores>::Memory)...});
  launch_kernel("fold_backward_pass_sm90", &fold_backward_pass_kernel<E, M, Scores, Tiles...>,
                blocks_for(blocks), kThreadsOfPass, kBytes + kSharedAlignment, launch.stream, arguments, m,
                scores);
}

}  // namespace monoidreduce::sm90
