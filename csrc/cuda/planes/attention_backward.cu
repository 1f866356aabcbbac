#include "../attention_passes.cuh"
#include "../engine.h"
#include "attention_scores.cuh"
#include "backward_passes.cuh"

namespace monoidreduce::cuda::planes {
namespace {

// kWidth: of the operands. Up to 128 one block has all of it. Of 256 each of two blocks has half; their slots take what memory
// is left. One stage for each stream, where there is no space for two: the next tile of one is loaded while the other is
// multiplied.
template <GradientOf kOf, int kWidth>
using Tile = std::conditional_t<
    (kWidth <= 128), PlanesPassTile<kOf, kWidth, kWidth == 64 || kOf == GradientOf::kPayload ? 2 : 1, false>,
    PlanesPassTile<kOf, kWidth / 2, 1, false, 2, kOf == GradientOf::kPayload ? 8 : 3>>;
static_assert(tiles::kPass.staying == Tile<GradientOf::kRows, 64>::kStaying &&
              tiles::kPass.streamed == Tile<GradientOf::kRows, 64>::kStreamed);

}  // namespace

template <>
void run(const AttentionBackward& x, const Plan& plan, const Launch& launch) {
  const FoldProblem problem = attention_problem(x);
  const DeviceGuard device(x.q.cuda_device);
  const FoldGradients wanted{
      .grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v, .d_bias = x.d_bias};
  const auto gradients = [&]<int kWidth>(std::integral_constant<int, kWidth>, const PlanesScratch& scratch,
                                         const LogSumExpRows<float>& rows) {
    const auto operands =
        split_operands<Tile<GradientOf::kRows, kWidth>>(problem, x.grad_out, scratch.part[4], launch);
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
  backward_passes<true>(x, launch, gradients);
}

}  // namespace monoidreduce::cuda::planes
