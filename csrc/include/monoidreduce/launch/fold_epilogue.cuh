// Launches device/contraction/fold_epilogue.cuh.
#pragma once

#include <cstdint>

#include "monoidreduce/device/contraction/fold_epilogue.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/contraction_schedule.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce {

// The size of the partial states in floats.
template <class M, class Tile>
std::int64_t partial_floats(const TileSchedule& schedule) {
  return std::int64_t{schedule.most_groups()} * schedule.clusters * Tile::kShares * Tile::kRowBlock *
         static_cast<std::int64_t>(sizeof(typename M::State) / sizeof(float));
}

// The scratch memory of a problem's fold in floats: partial states, and the tiles' own scratch.
template <class M, class Tile>
std::int64_t fold_floats(const FoldProblem& p) {
  const TileSchedule schedule = contraction_schedule<Tile>(p);
  return partial_floats<M, Tile>(schedule) + std::int64_t{schedule.clusters} * Tile::kScratch;
}

// Folds every row of a problem without a payload: rows.store(row, state). epilogue: one that calls `fold`, or that itself.
template <class E, class Tile, class Epilogue, class M, class Scores, class Rows>
void fold_contraction(const Epilogue& epilogue, const FoldEpilogue<M, Scores, Rows>& fold,
                      const FoldProblem& p, const Launch& launch) {
  const TileSchedule schedule = contraction_schedule<Tile>(p);
  float* const scratch = reinterpret_cast<float*>(fold.partial) + partial_floats<M, Tile>(schedule);
  contraction<E>(Tile{}, schedule, p, epilogue, scratch, "fold_contraction", launch);
  constexpr int kThreads = 128;
  const DeviceGuard guard(p.a.cuda_device);
  launch_kernel("combine_partial", &combine_partial<M, Tile, Rows>,
                blocks_for((p.rows() + kThreads - 1) / kThreads), kThreads, 0, launch.stream, fold.m,
                schedule, fold.order, fold.partial, fold.rows);
}

// partial: fold_floats of scratch.
template <class E, class Tile, class M, class Scores, class Rows>
void fold_contraction(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows, void* partial,
                      const Launch& launch) {
  const FoldEpilogue<M, Scores, Rows> fold{
      m, scores, rows, row_order(p), static_cast<int>(p.columns()), static_cast<typename M::State*>(partial)};
  fold_contraction<E, Tile>(fold, fold, p, launch);
}

}  // namespace monoidreduce
