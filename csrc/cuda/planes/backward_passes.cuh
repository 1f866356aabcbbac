// The backward pass of attention in planes, around the kernels that compute its gradients.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../plan/attention.h"
#include "../../plan/tiles.h"
#include "monoidreduce/launch/fold_backward_planes_sm90.cuh"
#include "monoidreduce/launch/fold_forward_planes_sm90.cuh"
#include "monoidreduce/launch/row_prologue.cuh"
#include "monoidreduce/launch/sink_gradient.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/rows.h"

namespace monoidreduce::cuda::planes {

using namespace monoidreduce::sm90;

// The scratch: parts one behind the other, as PlanesParts says.
struct PlanesScratch {
  float* part[PlanesParts::kCount];
  PlaneResiduals residuals;
  RowMarks marks;

  template <class Call>
  PlanesScratch(const Call& x, const PlanesParts& parts) {
    float* at = data<float>(x.scratch);
    for (int n = 0; n < PlanesParts::kCount; ++n) part[n] = at, at += parts.floats[n];
    residuals = {part[2], static_cast<int>(parts.padded_rows)};
    marks = {part[3], part[3] + parts.row_marks, static_cast<int>(parts.row_units),
             static_cast<int>(parts.column_units)};
  }
};

// Splits the operands into planes at `at`, for the kernels with this tile.
template <class Tile>
SplitOperands split_operands(const FoldProblem& p, const TensorView& grad_out, float* at,
                             const Launch& launch) {
  const auto split = [&](const TensorView& t) {
    float* const to = at;
    at += planes_floats<Tile>(t);
    return split_heads<Tile>(t, to, launch);
  };
  return {split(p.a), split(p.b), split(p.payload), split(grad_out)};
}

// Whether the call has a softmax. attend has none, so its backward pass needs neither a log-sum-exp nor <grad_out, out>.
template <class Call>
bool has_softmax(const Call& x) {
  if constexpr (requires { x.options.weights; })
    return !x.options.weights;
  else
    return true;
}

// Prepares the rows, and computes the gradient of sinks. run(width, scratch, rows) must launch the kernels for the other
// gradients. width: a constant, the larger width rounded up to 64, 128 or, if kWide, 256. rows: what is known of each row.
template <bool kWide, class Call, class Run>
void backward_passes(const Call& x, const Launch& launch, Run run) {
  const PlanesParts parts(x);
  const PlanesScratch scratch(x, parts);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  float *of_lse = scratch.part[0], *centre = scratch.part[1];
  const LogSumExpRows<float> rows{data<float>(x.lse), data<float>(x.lse_low), {centre, 1}, {of_lse, 1}};
  if (has_softmax(x)) {
    row_centre<float>(x.grad_out, x.out, x.out_low, x.grad_lse, of_lse, centre, launch);
    sink_gradient(LogSumExp<float>{}, rows, x, launch);
    const std::int64_t padded = x.q.size[0] * x.q.size[1] * parts.padded_rows;
    launch_kernel("gather_residuals", &gather_residuals, blocks_for((padded + 255) / 256), 256, 0,
                  launch.stream, data<const float>(x.lse), data<const float>(x.lse_low),
                  static_cast<const float*>(centre), static_cast<float>(x.options.scale),
                  static_cast<int>(x.q.size[2]), padded, scratch.residuals);
  }
  check_cuda(cudaMemsetAsync(scratch.part[3], 0, parts.floats[3] * sizeof(float), stream),
             "cudaMemsetAsync for fold_backward_planes_sm90");
  const std::int64_t width = std::max(x.q.size[3], x.v.size[3]);
  if (width <= 64)
    run(std::integral_constant<int, 64>{}, scratch, rows);
  else if (width <= 128 || !kWide)
    run(std::integral_constant<int, 128>{}, scratch, rows);
  else if constexpr (kWide)
    run(std::integral_constant<int, 256>{}, scratch, rows);
}

}  // namespace monoidreduce::cuda::planes
