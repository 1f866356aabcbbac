// Launches device/contraction/saving_epilogue_sm90.cuh.
#pragma once

#include "monoidreduce/device/contraction/saving_epilogue_sm90.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/launch/fold_epilogue.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce::sm90 {

// Where the softmax weights of one score are saved. kept: [rows, columns]; frames: [rows, tiles], their row maxima.
template <class Tile>
auto kept_weights(const TensorView& kept, float* frames) {
  using Weight = std::conditional_t<Tile::kPlanes == 2, float, __half>;
  return KeptWeights<1, Tile::kColumns, Weight>{.weights = {static_cast<Weight*>(kept.data)},
                                                .frames = {frames},
                                                .pitch = kept.stride[0],
                                                .columns = static_cast<int>(kept.size[1])};
}

// Like fold_contraction, and also saves the softmax weights of the first columns.
template <class E, class Tile, class M, class Scores, class Rows, class Kept>
void fold_and_save(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows, void* partial,
                   const Kept& kept, const Launch& launch) {
  static_assert(Kept::kTileColumns == Tile::kColumns);
  const FoldEpilogue<M, Scores, Rows> fold{
      m, scores, rows, row_order(p), static_cast<int>(p.columns()), static_cast<typename M::State*>(partial)};
  TensorView weights[M::kScores];
  for (int n = 0; n < M::kScores; ++n) {
    weights[n] = p.a;
    weights[n].dtype = Tile::kPlanes == 2 ? DType::kFloat32 : DType::kFloat16;
    weights[n].data = kept.weights[n];
    weights[n].size[3] = kept.columns, weights[n].stride[2] = kept.pitch, weights[n].stride[3] = 1;
  }
  const SavingEpilogue<M, Scores, Rows, Kept> epilogue{fold, kept, stores_for(Tile{}, weights)};
  fold_contraction<E, Tile>(epilogue, fold, p, launch);
}

}  // namespace monoidreduce::sm90
