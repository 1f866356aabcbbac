// Launches kernels that NVRTC compiled for a user's program, on tensor cores, with the tiles of either
// family.
#pragma once

#include "../plan/tiles.h"
#include "engine.h"
#include "monoidreduce/device/program/statistics.h"
#include "monoidreduce/launch/contraction_schedule.h"
#include "monoidreduce/launch/loaded_kernels.cuh"
#include "monoidreduce/launch/most_sizes.h"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/ops/statistics.h"

namespace monoidreduce::cuda {

struct Nothing {};

template <class Call>
ProgramTables tables_of(const Call& x) {
  const auto count = [](const TensorView& t) { return t.present() ? t.size[0] : std::int64_t{0}; };
  return {x.table.data, static_cast<const std::int64_t*>(x.table_index.data), count(x.table),
          count(x.table_index)};
}

template <class Call>
ProgramData data_of(const Call& x) {
  const auto pitch = [](const char* name, const TensorView& t) -> std::int64_t {
    if (!t.present()) return 0;
    require(t.size[1] <= 1 || t.stride[1] == 1, name, ": expected rows of adjacent numbers, got stride ",
            t.stride[1]);
    return t.stride[0];
  };
  std::int64_t first_column = 0;
  if constexpr (requires { x.first_column; }) first_column = x.first_column;
  return {.row = x.row.data,
          .column = x.column.data,
          .row_index = static_cast<const std::int64_t*>(x.row_index.data),
          .column_index = static_cast<const std::int64_t*>(x.column_index.data),
          .row_pitch = pitch("row", x.row),
          .column_pitch = pitch("column", x.column),
          .row_index_pitch = pitch("row_index", x.row_index),
          .column_index_pitch = pitch("column_index", x.column_index),
          .rows = x.a.size[0],
          .columns = x.b.size[0],
          .first_column = first_column,
          .scale = x.scale,
          .tables = tables_of(x)};
}
template <class Call>
StatisticsResults results_of(const Call& x) {
  return {x.values.data, x.low.data, static_cast<std::int64_t*>(x.indices.data), x.a.size[0],
          x.b.size[0] == 0 ? -1 : 0};
}

// The members of ProgramFold and ProgramGradient (program_epilogue.cuh), whose layout is the same for every
// program.
struct FoldParameter {
  ProgramData data;
  void* partial;
  MostMemory most;
};
struct RowsParameter {
  StatisticsResults results;
  const RankedElement* best;
};
template <class Tile>
void fold_by(Tile tile, const StatisticsFold& x, const Launch& launch) {
  const FoldProblem p = statistics_problem(x);
  const TileSchedule schedule = contraction_schedule(kSizesOf<Tile>, p, device_facts(x.a.cuda_device));
  float* const partial = static_cast<float*>(x.scratch.data);
  float* const parked = partial + partial_floats(kSizesOf<Tile>, x.state_words, schedule);
  const DeviceGuard guard(x.a.cuda_device);
  MostMemory most{};
  if (x.finds_most) {
    float* const scratch = parked + std::int64_t{schedule.clusters} * Tile::kScratch;
    most = most_memory(kSizesOf<Tile>, p.rows(), schedule, scratch);
    const std::int64_t zeros = most_sizes(kSizesOf<Tile>, p.rows(), schedule).zeros;
    check_cuda(cudaMemsetAsync(scratch, 0, static_cast<std::size_t>(zeros) * sizeof(float),
                               static_cast<cudaStream_t>(launch.stream)),
               "cudaMemsetAsync for statistics_fold");
  }
  launch_loaded("statistics_fold", x.kernels, static_cast<unsigned>(schedule.clusters * Tile::kBlocks),
                Tile::kThreads, contraction_bytes<Nothing>(tile), launch.stream,
                contraction_arguments(tile, schedule, p, parked), FoldParameter{data_of(x), partial, most});
  constexpr int kThreads = 128;
  launch_loaded("combine_partial", x.kernels + 1, blocks_for(parts_of(p.rows(), kThreads / kCombiningLanes)),
                kThreads, 0, launch.stream, Nothing{}, schedule, row_order(p), partial,
                RowsParameter{results_of(x), most.best});
}

// Tile<kScores> is the tile for so many scores.
template <template <int> class Tile>
void fold(const StatisticsFold& x, const Launch& launch) {
  if (x.other_a.present())
    fold_by(Tile<2>{}, x, launch);
  else
    fold_by(Tile<1>{}, x, launch);
}

// Each part of the columns has gradients of its own.
inline void check_parts(const StatisticsRowGradient& x, const Plan& plan) {
  require(plan.owned_rows.has_value(), "plan: expected one with owned_rows, got ", text(plan));
  for (const TensorView* t : {&x.d_a, &x.d_other_a, &x.sums})
    require(!t->present() || t->size[0] == plan.owned_rows->splits, "gradients: expected ",
            plan.owned_rows->splits, " parts, got ", t->size[0]);
}

template <class Stores>
struct GradientParameter {
  ProgramData data;
  Stores stores;
};
template <class Tile, class Stores>
void local_gradient_by(Tile tile, const StatisticsLocalGradient& x, const Stores& stores,
                       const Launch& launch) {
  const FoldProblem p = statistics_problem(x);
  const TileSchedule schedule = contraction_schedule(kSizesOf<Tile>, p, device_facts(x.a.cuda_device));
  static_assert(Tile::kScratch == 0);
  const DeviceGuard guard(x.a.cuda_device);
  launch_loaded(
      "statistics_local_gradient", x.kernels, static_cast<unsigned>(schedule.clusters * Tile::kBlocks),
      Tile::kThreads, contraction_bytes<typename Stores::Memory>(tile), launch.stream,
      contraction_arguments(tile, schedule, p, nullptr), GradientParameter<Stores>{data_of(x), stores});
}
// Tile<kScores, kOuts>: kOuts is the number of scores that get gradients.
template <template <int, int> class Tile>
void local_gradient(const StatisticsLocalGradient& x, const Launch& launch) {
  const auto of_first = [&](auto tile) {
    local_gradient_by(tile, x, stores_for(tile, {as_rows(x.out)}), launch);
  };
  if (!x.other_a.present()) return of_first(Tile<1, 1>{});
  if (!x.other_out.present()) return of_first(Tile<2, 1>{});
  const Tile<2, 2> tile;
  local_gradient_by(tile, x, stores_for(tile, {as_rows(x.out), as_rows(x.other_out)}), launch);
}

}  // namespace monoidreduce::cuda
