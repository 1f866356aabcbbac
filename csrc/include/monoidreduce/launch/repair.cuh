// Launches device/resident/repair.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/block/tile.cuh"
#include "monoidreduce/device/resident/repair.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce {

// Enough blocks for a warp for each look at marks, and at most a full device. Launching blocks that find no
// marks would take longer than looking at the marks.
inline unsigned repair_blocks(std::int64_t looks, int device) {
  const std::int64_t most = 4 * multiprocessors(device);
  return blocks_for(std::clamp<std::int64_t>(divide_up(looks, kRepairThreads / kWarp), 1, most));
}

// Recomputing marked rows takes these arguments, and a warp looks at kWarp rows at a time.
inline RepairArguments repair_arguments(const FoldProblem& p, const FoldOutput& to) {
  return {.rows = device_tensor(p.a),
          .columns = device_tensor(p.b),
          .payload = device_tensor(p.payload),
          .bias = device_tensor(p.bias),
          .out_bias = device_tensor(p.out_bias),
          .out = device_tensor(to.out),
          .low = device_tensor(to.low),
          .range = p.range};
}
inline unsigned repair_blocks(const FoldProblem& p) {
  return repair_blocks(divide_up(p.a.size[0] * p.a.size[1] * p.a.size[2], kWarp), p.a.cuda_device);
}

// The same for the gradients of marked rows and columns. wanted.d_bias may be absent. For a bias of each column (the MLP's) it
// is [columns]. The gradient of a bias of scores is recomputed too, if each score has an element of its own. Gradients of shared
// elements and of tables are not recomputed: if a marked line made them NaN, they stay NaN.
inline RepairArguments repair_arguments(const FoldProblem& p, const FoldGradients& wanted, float scale) {
  const bool by_column = wanted.d_bias.rank == 1;
  return {.rows = device_tensor(p.a),
          .columns = device_tensor(p.b),
          .payload = device_tensor(p.payload),
          .bias = device_tensor(p.bias),
          .grad_out = device_tensor(wanted.grad_out),
          .d_rows = device_tensor(wanted.d_a),
          .d_columns = device_tensor(wanted.d_b),
          .d_payload = device_tensor(wanted.d_payload),
          .d_bias = by_column || repeats(wanted.d_bias) ? Tensor{} : device_tensor(wanted.d_bias),
          .d_column_bias = by_column ? static_cast<float*>(wanted.d_bias.data) : nullptr,
          .range = p.range,
          .scale = scale};
}
inline unsigned repair_blocks(const FoldProblem& p, const RowMarks& marks) {
  return repair_blocks(
      p.a.size[0] * std::max(p.a.size[1] * marks.row_units, p.b.size[1] * marks.column_units),
      p.a.cuda_device);
}

// Recomputes marked rows.
template <class M, class Rows>
void repair_forward(const M& m, const FoldProblem& p, const Rows& rows, const FoldOutput& to,
                    const Launch& launch) {
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("repair_forward", &repair_forward_kernel<M, Rows>, repair_blocks(p), kRepairThreads, 0,
                launch.stream, repair_arguments(p, to), m, Score<typename M::Real>(p.score), rows);
}

// Recomputes the gradients of marked rows and columns.
template <class M, class Rows>
void repair_backward(const M& m, const FoldProblem& p, const Rows& rows, const FoldGradients& wanted,
                     const RowMarks& marks, const Launch& launch) {
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("repair_backward", &repair_backward_kernel<M, Rows>, repair_blocks(p, marks), kRepairThreads,
                0, launch.stream, repair_arguments(p, wanted, static_cast<float>(p.score.scale)), m,
                Score<float>(p.score), rows, marks);
}

}  // namespace monoidreduce
