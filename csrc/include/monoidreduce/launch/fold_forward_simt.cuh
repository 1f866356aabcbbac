// Launches device/simt/fold_forward_simt.cuh.
#pragma once

#include "monoidreduce/device/simt/fold_forward_simt.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce {

namespace simt {

inline std::int64_t forward_jobs(const FoldProblem& p) {
  const std::int64_t slices = p.payload_width() > 0 ? divide_up(p.payload_width(), kSlice) : 1;
  return p.batch() * p.heads() * divide_up(p.rows(), kTile) * slices;
}
inline ForwardArguments forward_arguments(const FoldProblem& p, const FoldOutput& out,
                                          const Splits& splits = {}) {
  return {.rows = {device_tensor(p.a), device_tensor(p.other_a)},
          .columns = {device_tensor(p.b), device_tensor(p.other_b)},
          .payload = device_tensor(p.payload),
          .bias = device_tensor(p.bias),
          .out = device_tensor(out.out),
          .out_low = device_tensor(out.low),
          .out_bias = device_tensor(p.out_bias),
          .range = p.range,
          .splits = splits};
}

}  // namespace simt

// Folds every row of the problem, and calls rows.store(row, P_i). With a payload, writes its fold to out [B, H, M, D], in the
// payload's element type. Columns can be split only without a payload.
template <bool kPayload, class M, class Rows, class Policy>
  requires(!kPayload || PayloadMonoid<M>)
void fold_forward(const M& m, const FoldProblem& p, const Policy& score, const Rows& rows,
                  const FoldOutput& out, const simt::Splits& splits, const Launch& launch) {
  const std::int64_t jobs = simt::forward_jobs(p) * splits.count;
  if (jobs == 0) return;
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("fold_forward_simt", &simt::fold_forward<kPayload, M, Rows, Policy>, blocks_for(jobs),
                kThreads, sizeof(TileMemory<typename M::Real>), launch.stream, m,
                simt::forward_arguments(p, out, splits), score, rows);
  if constexpr (!kPayload) {
    if (splits.count == 1) return;
    const std::int64_t rows_of_all = p.batch() * p.heads() * p.rows();
    launch_kernel("combine_splits_simt", &simt::combine_splits<M, Rows>,
                  blocks_for(divide_up(rows_of_all * simt::kCombiningLanes, kThreads)), kThreads, 0,
                  launch.stream, m, rows, splits, rows_of_all);
  }
}
// Scores by score.h.
template <bool kPayload, class M, class Rows>
  requires(!kPayload || PayloadMonoid<M>)
void fold_forward(const M& m, const FoldProblem& p, const Rows& rows, const FoldOutput& out,
                  const Launch& launch, const simt::Splits& splits = {}) {
  fold_forward<kPayload>(m, p, Score<typename M::Real>(p.score), rows, out, splits, launch);
}

}  // namespace monoidreduce
