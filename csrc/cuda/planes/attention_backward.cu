#include "../attention_passes.cuh"
#include "../engine.h"
#include "attention_scores.cuh"
#include "backward_passes.cuh"

namespace monoidreduce::cuda::planes {
namespace {

// One stage for each stream, where there is no space for two: the next tile of one is loaded while the other is
// multiplied.
template <GradientOf kOf, int kWidth>
using Tile = PlanesPassTile<kOf, kWidth, kWidth == 64 || kOf == GradientOf::kPayload ? 2 : 1, false>;
static_assert(tiles::kPass.staying == Tile<GradientOf::kRows, 64>::kStaying &&
              tiles::kPass.streamed == Tile<GradientOf::kRows, 64>::kStreamed);

}  // namespace

template <>
void run(const AttentionBackward& x, const Plan& plan, const Launch& launch) {
  const FoldProblem problem = attention_problem(x);
  const DeviceGuard device(x.q.cuda_device);
  const FoldGradients wanted{
      .grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v, .d_bias = x.d_bias};
  const auto gradients = [&]<int kWidth>(std::integral_constant<int, kWidth>, const SplitOperands& operands,
                                         const PlanesScratch& scratch, const LogSumExpRows<float>& rows) {
    const auto pass = [&]<GradientOf kOf>(std::integral_constant<GradientOf, kOf>) {
      with_scores(problem, x.d_bias, [&](const auto& scores) {
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
    repair_backward(LogSumExp<float>{}, problem, rows, wanted, scratch.marks, launch);
  };
  backward_passes(x, problem, launch, gradients);
}

}  // namespace monoidreduce::cuda::planes
