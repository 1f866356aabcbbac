// Launches device/contraction/fold_epilogue.cuh.
#pragma once

#include <cstdint>

#include "monoidreduce/device/contraction/fold_epilogue.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/contraction_schedule.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce {

template <class M>
inline constexpr std::int64_t kStateFloats = sizeof(typename M::State) / sizeof(float);

// Folds every row of a problem without a payload, and calls rows.store(row, state). epilogue: `fold` itself, or an epilogue
// that calls it.
template <class E, class Tile, class Epilogue, class M, class Scores, class Rows>
void fold_contraction(const Epilogue& epilogue, const FoldEpilogue<M, Scores, Rows>& fold,
                      const FoldProblem& p, const Launch& launch) {
  constexpr ContractionSizes kTile = kSizesOf<Tile>;
  const TileSchedule schedule = contraction_schedule(kTile, p, device_facts(p.a.cuda_device));
  float* const scratch =
      reinterpret_cast<float*>(fold.partial) + partial_floats(kTile, kStateFloats<M>, schedule);
  contraction<E>(Tile{}, p, epilogue, scratch, "fold_contraction", launch);
  constexpr int kThreads = 128;
  const DeviceGuard guard(p.a.cuda_device);
  launch_kernel("combine_partial", &combine_partial<M, Tile, Rows>,
                blocks_for(parts_of(p.rows(), kThreads / kCombiningLanes)), kThreads, 0, launch.stream,
                fold.m, schedule, fold.order, fold.partial, fold.rows);
}

// partial: scratch of fold_floats() floats (contraction_schedule.h).
template <class E, class Tile, class M, class Scores, class Rows>
void fold_contraction(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows, void* partial,
                      const Launch& launch) {
  const FoldEpilogue<M, Scores, Rows> fold{
      m, scores, rows, row_order(p), static_cast<int>(p.columns()), static_cast<typename M::State*>(partial)};
  fold_contraction<E, Tile>(fold, fold, p, launch);
}

}  // namespace monoidreduce
