// Launches device/resident/fold_backward_planes_sm90.cuh.
#pragma once

#include <cstdint>

#include "monoidreduce/device/resident/fold_backward_planes_sm90.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce::sm90 {

// The operands of the backward pass, in planes.
struct SplitOperands {
  PlaneMaps rows, columns, payload, grad_out;
};

// The arguments of the kernel that computes one gradient in float32; Tile::kOf says which. residuals: the log-sum-exp of each row,
// and its grad_lse - delta. d_column_bias: as in PlanesPassArguments.
template <class Tile>
PlanesPassArguments backward_planes_arguments(const FoldProblem& p, const SplitOperands& split,
                                              const FoldGradients& wanted, float* d_column_bias,
                                              const PlaneResiduals& residuals, const RowMarks& marks) {
  const std::int64_t group = p.heads() / p.column_heads();
  const std::int64_t streamed = Tile::kOfRows ? p.columns() : p.rows() * group;
  constexpr std::int64_t kLineBytes = 2 * Tile::kBlocks * PlaneTile<Tile::kWidth>::kLineOfBoth;
  const TensorView& gradient = Tile::kOfRows ? wanted.d_a : Tile::kOfPayload ? wanted.d_payload : wanted.d_b;
  OutputRows gradient_rows = output_rows({gradient});
  if (Tile::kTransposed) gradient_rows.stride[2] = gradient.stride[3];
  PlanesPassArguments arguments{
      .staying = {split.columns, split.payload},
      .streamed = {split.rows, split.grad_out},
      .gradient = gradient_rows,
      .d_column_bias = d_column_bias,
      .residuals = residuals,
      .marks = marks,
      .shape = fold_shape(p, section_of(p, streamed * kLineBytes, Tile::kOfRows ? group : 1))};
  if constexpr (Tile::kOfRows) {
    arguments.staying[0] = split.rows, arguments.staying[1] = split.grad_out;
    arguments.streamed[0] = split.columns, arguments.streamed[1] = split.payload;
  }
  return arguments;
}
template <class Tile>
unsigned backward_planes_blocks(const FoldProblem& p) {
  const std::int64_t lines = Tile::kOfRows ? p.rows() : p.columns();
  const std::int64_t heads = Tile::kOfRows ? p.heads() : p.column_heads();
  return blocks_for(p.batch() * heads * ((lines + Tile::kStaying - 1) / Tile::kStaying) * Tile::kBlocks);
}
template <class Tile>
inline constexpr std::size_t kBackwardPlanesBytes = sizeof(PlanesPassMemory<Tile>) + kSharedAlignment;

// Computes one gradient. With the gradient of w1, the kernel for an MLP also computes that of bias1. residuals: attention's kernels
// read them; an MLP's do not, as it has no softmax.
template <class Tile, class M, class Scores>
void fold_backward_planes(const M& m, const Scores& scores, const FoldProblem& p, const SplitOperands& split,
                          const FoldGradients& wanted, const PlaneResiduals& residuals, const RowMarks& marks,
                          const Launch& launch) {
  float* const d_column_bias = kBiasedByColumn<Scores> ? static_cast<float*>(wanted.d_bias.data) : nullptr;
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("fold_backward_planes_sm90", &fold_backward_planes_kernel<Tile, M, Scores>,
                backward_planes_blocks<Tile>(p), Tile::kThreads, kBackwardPlanesBytes<Tile>, launch.stream,
                backward_planes_arguments<Tile>(p, split, wanted, d_column_bias, residuals, marks), m,
                scores);
}

}  // namespace monoidreduce::sm90
