// Launches device/contraction/contraction_sm90.cuh.
#pragma once

#include "monoidreduce/device/contraction/contraction_sm90.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/contraction_schedule.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensor_map.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/ops/matrix.h"

namespace monoidreduce::sm90 {

// How tiles are stored into tensors [1, 1, rows, columns].
template <int kOuts, class Tile>
SlabStores<kOuts> stores_for(Tile, const TensorView (&tensors)[kOuts]) {
  SlabStores<kOuts> stores;
  for (int n = 0; n < kOuts; ++n) stores.outs[n] = tensor_map(tensors[n], kSlabBoxRows);
  return stores;
}

// The scales at the ends of an operand's lines (split_planes.cuh).
inline LineScales line_scales(const OperandPlanes& of) {
  if (of.scales == nullptr) return {};
  return {of.scales, of.scale_pitch, static_cast<int>(of.scale_lines)};
}
// The planes of an operand in lines of both.
inline TensorView plane_lines(const OperandPlanes& of) {
  TensorView lines = as_rows(of.halves);
  lines.size[3] = 2 * of.plane;
  return lines;
}

// The kernel's arguments for the products a b^T of a problem. Each b may be row-major, [columns, width], or transposed: columns
// adjacent in memory. a is transposed if Tile::kRowsTransposed says so; p.order then orders the width, the dimension that
// is summed over.
template <class Tile>
ContractionArguments<Tile::kScores> contraction_arguments(Tile, const TileSchedule& schedule,
                                                          const FoldProblem& p, float*) {
  ContractionArguments<Tile::kScores> arguments{
      .order = row_order(p.order, Tile::kRowsTransposed ? p.width() : p.rows(), p.first_place)};
  const TensorView rows[] = {p.a, p.other_a}, columns[] = {p.b, p.other_b};
  for (int score = 0; score < Tile::kScores; ++score) {
    const bool transposed = columns[score].stride[3] != 1;
    arguments.transposed[score] = transposed;
    if constexpr (Tile::kPlanes == 2) {
      const OperandPlanes &a = score == 0 ? p.a_planes : p.other_a_planes,
                          &b = score == 0 ? p.b_planes : p.other_b_planes;
      arguments.rows[score] = tensor_map(plane_lines(a), Tile::kRowsTransposed ? kSlab : Tile::kRows);
      arguments.columns[score] = tensor_map(plane_lines(b), Tile::column_lines(transposed));
      arguments.planes[score] = {static_cast<int>(a.plane), static_cast<int>(b.plane), line_scales(a),
                                 line_scales(b)};
    } else {
      arguments.rows[score] = Tile::kRowsTransposed ? tensor_map(transposed_rows(rows[score]), kSlab)
                                                    : tensor_map(rows[score], Tile::kRows);
      arguments.columns[score] = tensor_map(transposed ? transposed_rows(columns[score]) : columns[score],
                                            Tile::column_lines(transposed));
    }
    arguments.steps[score] = static_cast<int>((rows[score].size[3] + kSlab - 1) / kSlab);
  }
  arguments.schedule = schedule;
  return arguments;
}
// Bytes of shared memory, including the epilogue's.
template <class EpilogueMemory, class Tile>
constexpr std::size_t contraction_bytes(Tile) {
  return sizeof(ContractionMemory<Tile, EpilogueMemory>) + kSharedAlignment;
}

// Computes the products a b^T of a problem, tile by tile, and runs the epilogue on each tile.
template <class E, class Tile, class Epilogue>
void contraction(Tile tile, const FoldProblem& p, const Epilogue& epilogue, float* scratch, const char* name,
                 const Launch& launch) {
  const TileSchedule schedule = contraction_schedule(kSizesOf<Tile>, p, device_facts(p.a.cuda_device));
  const DeviceGuard guard(p.a.cuda_device);
  using Factor = std::conditional_t<Tile::kPlanes == 2, __half, E>;
  launch_kernel(name, &contraction_kernel<Factor, Tile, Epilogue>,
                static_cast<unsigned>(schedule.clusters * Tile::kBlocks), Tile::kThreads,
                contraction_bytes<typename Epilogue::Memory>(tile), launch.stream,
                contraction_arguments(tile, schedule, p, scratch), epilogue);
}

}  // namespace monoidreduce::sm90
