#include <algorithm>

#include "../../plan/mlp.h"
#include "../../plan/tiles.h"
#include "../engine.h"
#include "../mlp_passes.cuh"
#include "monoidreduce/launch/fold_backward_planes_sm90.cuh"
#include "monoidreduce/launch/fold_forward_planes_sm90.cuh"
#include "monoidreduce/launch/repair.cuh"

namespace monoidreduce::cuda::planes {
namespace {

using namespace monoidreduce::sm90;

// Stages as in attention_backward.cu.
template <GradientOf kOf, int kWidth>
using Tile = PlanesPassTile<kOf, kWidth, kWidth == 64 || kOf == GradientOf::kPayload ? 2 : 1, true>;
static_assert(tiles::kPass.staying == Tile<GradientOf::kRows, 64>::kStaying &&
              tiles::kPass.streamed == Tile<GradientOf::kRows, 64>::kStreamed);
static_assert(MlpPlanesParts::kUnit == RowMarks::kUnit);

}  // namespace

template <>
void run(const MlpBackward& x, const Plan&, const Launch& launch) {
  const FoldProblem problem = mlp_problem(x);
  const MlpPlanesParts parts(x);
  float* const scratch = data<float>(x.scratch);
  const RowMarks marks{scratch, scratch + parts.row_marks, static_cast<int>(parts.row_marks),
                       static_cast<int>(parts.column_marks)};
  const DeviceGuard device(x.x.cuda_device);
  check_cuda(
      cudaMemsetAsync(scratch, 0, parts.marks * sizeof(float), static_cast<cudaStream_t>(launch.stream)),
      "cudaMemsetAsync for fold_backward_planes_sm90");
  const FoldGradients wanted{.grad_out = as_rows(x.grad_out),
                             .d_a = as_rows(x.d_x),
                             .d_b = as_rows(x.d_w1),
                             .d_payload = as_rows(transposed(x.d_w2)),
                             .d_bias = x.d_bias1};
  const NamedSum<Full> m{{}, x.activation};
  const BiasedScores<Full, float> scores{data<const float>(x.bias1), x.bias1.stride[0],
                                         static_cast<int>(x.w1.size[0])};
  const auto all = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    float* at = scratch + parts.marks;
    const auto split = [&](const TensorView& t) {
      float* const to = at;
      at += planes_floats<Tile<GradientOf::kRows, kWidth>>(t);
      return split_heads<Tile<GradientOf::kRows, kWidth>>(t, to, launch);
    };
    const SplitOperands operands{split(problem.a), split(problem.b), split(problem.payload),
                                 split(wanted.grad_out)};
    const auto pass = [&]<GradientOf kOf>(std::integral_constant<GradientOf, kOf>) {
      fold_backward_planes<Tile<kOf, kWidth>>(m, scores, problem, operands, wanted, {}, marks, launch);
    };
    if (wanted.d_a.present()) pass(std::integral_constant<GradientOf, GradientOf::kRows>{});
    if (wanted.d_b.present()) pass(std::integral_constant<GradientOf, GradientOf::kColumns>{});
    if (wanted.d_payload.present()) pass(std::integral_constant<GradientOf, GradientOf::kPayload>{});
  };
  if (std::max(problem.width(), problem.payload_width()) <= 64)
    all(std::integral_constant<int, 64>{});
  else
    all(std::integral_constant<int, 128>{});
  repair_backward(NamedSum<float>{{}, x.activation}, problem, SumRows<float>{}, wanted, marks, launch);
}

}  // namespace monoidreduce::cuda::planes
