// Launches device/contraction/contraction_sm80.cuh.
#pragma once

#include "monoidreduce/device/contraction/contraction_sm80.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/contraction_schedule.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce::sm80 {

// How tiles are stored into tensors [1, 1, rows, columns].
template <int kOuts, class Tile>
QuadStores<kOuts> stores_for(Tile, const TensorView (&tensors)[kOuts]) {
  QuadStores<kOuts> stores;
  for (int n = 0; n < kOuts; ++n) stores.outs[n] = strided_lines(tensors[n]).head(0, 0);
  return stores;
}

// The kernel's arguments for the products a b^T of a problem. scratch: kScratch floats per block.
template <class Tile>
ContractionArguments<Tile::kScores> contraction_arguments(Tile, const TileSchedule& schedule,
                                                          const FoldProblem& p, float* scratch) {
  ContractionArguments<Tile::kScores> arguments;
  const TensorView rows[] = {p.a, p.other_a}, columns[] = {p.b, p.other_b};
  for (int score = 0; score < Tile::kScores; ++score) {
    arguments.rows[score] = strided_lines(rows[score]).head(0, 0);
    arguments.columns[score] =
        strided_lines(Tile::transposed(score) ? transposed_rows(columns[score]) : columns[score]).head(0, 0);
    arguments.steps[score] = static_cast<int>((rows[score].size[3] + kSlab - 1) / kSlab);
  }
  arguments.schedule = schedule;
  arguments.parked = reinterpret_cast<float4*>(scratch);
  return arguments;
}
template <class, class Tile>
constexpr std::size_t contraction_bytes(Tile) {
  return sizeof(ContractionMemory<Tile>);
}

// Computes the products a b^T of a problem, tile by tile, and runs the epilogue on each tile. scratch: kScratch floats per
// block.
template <class E, class Tile, class Epilogue>
void contraction(Tile tile, const FoldProblem& p, const Epilogue& epilogue, float* scratch, const char* name,
                 const Launch& launch) {
  const TileSchedule schedule = contraction_schedule(kSizesOf<Tile>, p, device_facts(p.a.cuda_device));
  const DeviceGuard guard(p.a.cuda_device);
  launch_kernel(name, &contraction_kernel<E, Tile, Epilogue>, static_cast<unsigned>(schedule.clusters),
                Tile::kThreads, contraction_bytes<typename Epilogue::Memory>(tile), launch.stream,
                contraction_arguments(tile, schedule, p, scratch), epilogue);
}

}  // namespace monoidreduce::sm80
