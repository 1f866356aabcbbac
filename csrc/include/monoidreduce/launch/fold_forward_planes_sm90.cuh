// Launches device/resident/fold_forward_planes_sm90.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/resident/fold_forward_planes_sm90.cuh"
#include "monoidreduce/device/resident/split_heads.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/dense_lines.h"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/plane_maps.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce::sm90 {

// The size of an operand's planes, in floats. Tile: has the width of a plane, and the blocks that have one each.
template <class Tile>
std::int64_t planes_floats(const TensorView& heads) {
  return heads.size[0] * heads.size[1] * heads.size[2] * Tile::kBlocks * (Tile::kWidth + 4);
}

// Splits a float32 operand [B, H, rows, width] into planes at `to`, 16-byte aligned. Its lines are readable
// (dense_lines.h), or not dense at all.
template <class Tile>
PlaneMaps split_heads(const TensorView& x, float* to, const Launch& launch) {
  constexpr int kWidth = Tile::kWidth;
  if (x.stride[3] == 1) require_readable_lines(x);
  TensorView split{.data = to, .rank = 4, .dtype = DType::kFloat16, .cuda_device = x.cuda_device};
  std::int64_t stride = 1;
  for (int axis = 3; axis >= 0; --axis) {
    split.size[axis] = axis == 3 ? Tile::kBlocks * (2 * kWidth + 8) : x.size[axis];
    split.stride[axis] = stride, stride *= split.size[axis];
  }
  const HeadsToSplit heads{static_cast<const float*>(x.data),
                           {x.stride[0], x.stride[1], x.stride[2], x.stride[3]},
                           static_cast<int>(x.size[1]),
                           static_cast<int>(x.size[2]),
                           static_cast<int>(x.size[3]),
                           Tile::kBlocks,
                           x.size[0] * x.size[1] * x.size[2] * Tile::kBlocks,
                           static_cast<__half*>(split.data)};
  launch_kernel("split_heads", &split_heads_kernel<kWidth>,
                blocks_for((heads.lines + kLinesOfBlock<kWidth> - 1) / kLinesOfBlock<kWidth>), kPlaneThreads,
                0, launch.stream, heads);
  return plane_maps(split);
}

// Splits the float32 operands a, b and payload into planes: at `planes`, those of a, then of b, then of the payload. Returns the
// kernel's arguments. counter: of jobs, atomic, which this function clears; null if all rows have equally many unmasked columns.
template <class Tile>
PlanesArguments forward_planes_arguments(const FoldProblem& p, const FoldOutput& out, float* planes,
                                         unsigned long long* counter, const Launch& launch) {
  if (counter)
    check_cuda(cudaMemsetAsync(counter, 0, sizeof *counter, static_cast<cudaStream_t>(launch.stream)),
               "cudaMemsetAsync for fold_forward_planes_sm90");
  const auto split = [&](const TensorView& x) {
    float* const to = planes;
    planes += planes_floats<Tile>(x);
    return split_heads<Tile>(x, to, launch);
  };
  constexpr std::int64_t kLineBytes = Tile::kBlocks * PlanesMemory<Tile>::Operand::kLineOfBoth;
  return {.rows = split(p.a),
          .columns = split(p.b),
          .payload = split(p.payload),
          .out = output_rows(out),
          .counter = counter,
          .shape = fold_shape(p, section_of(p, p.columns() * 2 * kLineBytes, p.heads() / p.column_heads()))};
}
// one_each: jobs differ in length. The blocks of a cluster do not share a counter, so each job then has a cluster of its own.
template <class Tile>
unsigned forward_planes_blocks(const FoldProblem& p, bool one_each) {
  const std::int64_t row_tiles = (p.rows() + Tile::kRows - 1) / Tile::kRows;
  const std::int64_t jobs = p.batch() * p.heads() * row_tiles,
                     at_once = multiprocessors(p.a.cuda_device) / Tile::kBlocks;
  const std::int64_t clusters = Tile::kBlocks > 1 && one_each ? jobs : std::min(jobs, at_once);
  return static_cast<unsigned>(clusters * Tile::kBlocks);
}
template <class Tile>
inline constexpr std::size_t kForwardPlanesBytes = sizeof(PlanesMemory<Tile>) + kSharedAlignment;

// Splits the operands, and folds them. planes, counter: as above.
template <class Tile, class M, class Scores, class Rows>
void fold_forward_planes(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows,
                         const FoldOutput& out, float* planes, unsigned long long* counter,
                         const Launch& launch) {
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("fold_forward_planes_sm90", &fold_forward_planes_kernel<Tile, M, Scores, Rows>,
                forward_planes_blocks<Tile>(p, counter != nullptr), Tile::kThreads, kForwardPlanesBytes<Tile>,
                launch.stream, forward_planes_arguments<Tile>(p, out, planes, counter, launch), m, scores,
                rows);
}

}  // namespace monoidreduce::sm90
