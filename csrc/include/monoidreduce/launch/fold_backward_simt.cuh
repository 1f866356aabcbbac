// Launches device/simt/fold_backward_simt.cuh.
#pragma once

#include <algorithm>
#include <array>

#include "monoidreduce/device/simt/fold_backward_simt.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce {

namespace simt {

// Calls run(arguments, walk, blocks) for each launch of fold_backward that the wanted gradients need.
template <bool kPayload, int kScores, class Run>
void backward_launches(const FoldProblem& p, const FoldGradients& g, bool deterministic, const Run& run) {
  if (p.batch() * p.heads() * p.rows() * p.columns() == 0) return;

  PullArguments all{
      .pair = {{device_tensor(p.a), device_tensor(p.b), device_tensor(g.d_a), device_tensor(g.d_b)}},
      .pairs = 1,
      .bias = device_tensor(p.bias),
      .d_bias = device_tensor(g.d_bias),
      .range = p.range,
      .whole = p.whole};
  if (kScores == 2) {
    all.pair[all.pairs++] = {device_tensor(p.other_a), device_tensor(p.other_b), device_tensor(g.d_other_a),
                             device_tensor(g.d_other_b)};
  }
  if (kPayload && g.grad_out.present()) {
    all.pair[all.pairs++] = {device_tensor(g.grad_out), device_tensor(p.payload), Tensor(),
                             device_tensor(g.d_payload)};
  }

  // Launches the kernel for some of the gradients. The axes of a walk are: batch, column head, query head within the group of a
  // column head, row tile, column tile. A block loops over those in `looped`. exclusive: no other block adds to the same sums.
  const auto walk_tiles = [&](bool of_rows, bool of_columns, bool of_bias,
                              std::array<bool, Walk::kAxes> looped, bool exclusive) {
    PullArguments some = all;
    bool any = false;
    for (auto& pair : some.pair) {
      if (!of_rows) pair.d_rows = Tensor();
      if (!of_columns) pair.d_columns = Tensor();
      any = any || pair.d_rows.data || pair.d_columns.data;
    }
    if (!of_bias) some.d_bias = Tensor();
    if (!any && !some.d_bias.data) return;
    Walk walk{.extent = {p.batch(), p.column_heads(), p.heads() / p.column_heads(),
                         divide_up(p.rows(), kTile), divide_up(p.columns(), kTile)},
              .exclusive = exclusive};
    std::copy(looped.begin(), looped.end(), walk.looped);
    run(some, walk, blocks_for(walk.count(false)));
  };

  if (deterministic) {
    const auto broadcast = [&](int axis) { return g.d_bias.stride[axis] == 0; };
    walk_tiles(true, false, false, {0, 0, 0, 0, 1}, true);
    walk_tiles(false, true, false, {0, 0, 1, 1, 0}, true);
    walk_tiles(false, false, true, {broadcast(0), broadcast(1), broadcast(1), broadcast(2), broadcast(3)},
               true);
  } else if (p.score.softcap != 0 && !p.score.bias_inside) {
    // The gradient of a bias outside the softcap lacks the softcap's slope, so it needs tiles of its own.
    walk_tiles(true, true, false, {}, false);
    walk_tiles(false, false, true, {}, false);
  } else {
    walk_tiles(true, true, true, {}, false);
  }
}

}  // namespace simt

// Adds the wanted gradients of every row of the problem. rows.upstream(row) is the gradient with respect to P_i; with a payload
// it is the c of pull() (pull.h).
template <bool kPayload, class M, class Rows>
  requires(!kPayload || PayloadMonoid<M>)
void fold_backward(const M& m, const FoldProblem& p, const Rows& rows, const FoldGradients& g,
                   const Launch& launch) {
  using T = typename M::Real;
  const DeviceGuard device(p.a.cuda_device);
  const auto run = [&](const simt::PullArguments& arguments, const simt::Walk& walk, unsigned blocks) {
    launch_kernel("fold_backward_simt", &simt::fold_backward<kPayload, M, Rows>, blocks, kThreads,
                  sizeof(TileMemory<T>), launch.stream, m, arguments, Score<T>(p.score), rows, walk);
  };
  simt::backward_launches<kPayload, M::kScores>(p, g, launch.deterministic, run);
}

}  // namespace monoidreduce
