#include <algorithm>

#include "../../plan/attention.h"
#include "../../plan/tiles.h"
#include "../attention_passes.cuh"
#include "../engine.h"
#include "attention_scores.cuh"
#include "monoidreduce/launch/fold_backward_planes_sm90.cuh"
#include "monoidreduce/launch/fold_forward_planes_sm90.cuh"
#include "monoidreduce/launch/row_prologue.cuh"

namespace monoidreduce::cuda::planes {
namespace {

using namespace monoidreduce::sm90;

// kWidth: of the operands. Up to 128 one block has all of it. Of 256 each of two blocks has half; their slots take what memory
// is left. One stage for each stream, where there is no space for two: the next tile of one is loaded while the other is
// multiplied.
template <GradientOf kOf, int kWidth>
using Tile = std::conditional_t<
    (kWidth <= 128), PlanesPassTile<kOf, kWidth, kWidth == 64 || kOf == GradientOf::kPayload ? 2 : 1, false>,
    PlanesPassTile<kOf, kWidth / 2, 1, false, 2, kOf == GradientOf::kPayload ? 8 : 3>>;
static_assert(tiles::kPass.staying == Tile<GradientOf::kRows, 64>::kStaying &&
              tiles::kPass.streamed == Tile<GradientOf::kRows, 64>::kStreamed);

// The scratch: parts one behind the other, as PlanesParts says.
struct Scratch {
  float* part[PlanesParts::kCount];
  PlaneResiduals residuals;
  RowMarks marks;

  Scratch(const AttentionBackward& x, const PlanesParts& parts) {
    float* at = data<float>(x.scratch);
    for (int n = 0; n < PlanesParts::kCount; ++n) part[n] = at, at += parts.floats[n];
    residuals = {part[2], static_cast<int>(parts.padded_rows)};
    marks = {part[3], part[3] + parts.row_marks, static_cast<int>(parts.row_units),
             static_cast<int>(parts.column_units)};
  }
};

}  // namespace

template <>
void run(const AttentionBackward& x, const Plan& plan, const Launch& launch) {
  const FoldProblem problem = attention_problem(x);
  const PlanesParts parts(x);
  const Scratch scratch(x, parts);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const DeviceGuard device(x.q.cuda_device);
  float *of_lse = scratch.part[0], *centre = scratch.part[1];
  row_centre<float>(x.grad_out, x.out, x.out_low, x.grad_lse, of_lse, centre, launch);
  const LogSumExpRows<float> rows{data<float>(x.lse), data<float>(x.lse_low), {centre, 1}, {of_lse, 1}};
  sink_gradient(LogSumExp<float>{}, rows, x, launch);
  const std::int64_t padded = x.q.size[0] * x.q.size[1] * parts.padded_rows;
  launch_kernel("gather_residuals", &gather_residuals, blocks_for((padded + 255) / 256), 256, 0,
                launch.stream, data<const float>(x.lse), data<const float>(x.lse_low),
                static_cast<const float*>(centre), static_cast<float>(x.options.scale),
                static_cast<int>(x.q.size[2]), padded, scratch.residuals);
  check_cuda(cudaMemsetAsync(scratch.part[3], 0, parts.floats[3] * sizeof(float), stream),
             "cudaMemsetAsync for fold_backward_planes_sm90");

  const FoldGradients wanted{
      .grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v, .d_bias = x.d_bias};
  const auto all = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    float* at = scratch.part[4];
    const auto split = [&](const TensorView& t) {
      float* const to = at;
      at += planes_floats<Tile<GradientOf::kRows, kWidth>>(t);
      return split_heads<Tile<GradientOf::kRows, kWidth>>(t, to, launch);
    };
    const SplitOperands operands{split(problem.a), split(problem.b), split(problem.payload),
                                 split(x.grad_out)};
    const auto pass = [&]<GradientOf kOf>(std::integral_constant<GradientOf, kOf>) {
      with_scores<kWidth <= kWidestOfBlock>(problem, x.d_bias, [&](const auto& scores) {
        fold_backward_planes<Tile<kOf, kWidth>>(LogSumExp<Full>{}, scores, problem, operands, wanted,
                                                scratch.residuals, scratch.marks, launch);
      });
    };
    // If all rows share the bias, the pass that computes dK also computes the bias's gradient. Otherwise the
    // pass that computes dQ does.
    const bool of_bias = x.d_bias.present(), shared = rows_share(x.d_bias);
    if (plan.computed.rows || (of_bias && !shared))
      pass(std::integral_constant<GradientOf, GradientOf::kRows>{});
    if (plan.computed.columns || (of_bias && shared))
      pass(std::integral_constant<GradientOf, GradientOf::kColumns>{});
    if (plan.computed.payload) pass(std::integral_constant<GradientOf, GradientOf::kPayload>{});
  };
  const std::int64_t width = std::max(problem.width(), problem.payload_width());
  if (width <= 64)
    all(std::integral_constant<int, 64>{});
  else if (width <= 128)
    all(std::integral_constant<int, 128>{});
  else
    all(std::integral_constant<int, 256>{});
  repair_backward(LogSumExp<float>{}, problem, rows, wanted, scratch.marks, launch);
}

}  // namespace monoidreduce::cuda::planes
