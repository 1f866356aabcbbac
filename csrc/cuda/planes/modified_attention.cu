// Attention with functions of its scores (score_mod, mask_mod), and attend, whose kernels take the same arguments. NVRTC
// compiles them, behind one another: forward the fold and the repair of rows; backward the gradients of q, k and v, and the
// repair of all (folds/cuda/kernels.py).
#include "../engine.h"
#include "../modified_scores.cuh"
#include "backward_passes.cuh"
#include "monoidreduce/device/resident/modified_planes.cuh"
#include "monoidreduce/launch/repair.cuh"
#include "monoidreduce/ops/modified_attention.h"

namespace monoidreduce::cuda::planes {
namespace {

using namespace monoidreduce::planes;

template <int kWidth>
constexpr bool planned() {
  using Forward = ModifiedForwardTile<kWidth>;
  using Pass = ModifiedPassTile<GradientOf::kRows, kWidth>;
  return tiles::kModifiedPlanes.rows == Forward::kRows &&
         tiles::kModifiedPlanes.columns == Forward::kColumns && tiles::kPass.staying == Pass::kStaying &&
         tiles::kPass.streamed == Pass::kStreamed;
}
static_assert(planned<64>() && planned<128>());

}  // namespace

template <>
void run(const ModifiedAttentionForward& x, const Plan&, const Launch& launch) {
  const FoldProblem p = modified_problem(x);
  const FoldOutput out{x.out, x.out_low};
  float* const scratch = data<float>(x.scratch);
  auto* const counter = is_even(x) ? nullptr : reinterpret_cast<unsigned long long*>(scratch);
  const FullAttentionRows rows{data<float>(x.lse), data<float>(x.lse_low), data<const float>(x.sinks)};
  const DeviceGuard device(x.q.cuda_device);
  const auto fold = [&]<class Tile>(Tile) {
    launch_loaded("modified_attention_forward", kernel_of(x),
                  forward_planes_blocks<Tile>(p, counter != nullptr), Tile::kThreads,
                  kForwardPlanesBytes<Tile>, launch.stream,
                  forward_planes_arguments<Tile>(p, out, scratch + tiles::kCounterFloats, counter, launch),
                  LogSumExp<Full>{}, scores_of(x), rows);
  };
  if (std::max(p.width(), p.payload_width()) <= 64)
    fold(ModifiedForwardTile<64>{});
  else
    fold(ModifiedForwardTile<128>{});
  launch_loaded("repair_forward", kernel_of(x) + 1, repair_blocks(p), kRepairThreads, 0, launch.stream,
                repair_arguments(p, out), LogSumExp<double>{}, program_scores<float>(x),
                RepairedAttentionRows{rows.lse, rows.lse_low, rows.sinks});
}

template <>
void run(const ModifiedAttentionBackward& x, const Plan& plan, const Launch& launch) {
  const FoldProblem p = modified_problem(x);
  const FoldGradients wanted{.grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v};
  const DeviceGuard device(x.q.cuda_device);
  const auto gradients = [&]<int kWidth>(std::integral_constant<int, kWidth>, const PlanesScratch& scratch,
                                         const LogSumExpRows<float>& known) {
    const auto operands =
        split_operands<ModifiedPassTile<GradientOf::kRows, kWidth>>(p, x.grad_out, scratch.part[4], launch);
    const auto pass = [&]<GradientOf kOf>(std::integral_constant<GradientOf, kOf>) {
      using Tile = ModifiedPassTile<kOf, kWidth>;
      launch_loaded(
          "modified_attention_backward", kernel_of(x) + static_cast<int>(kOf),
          backward_planes_blocks<Tile>(p), Tile::kThreads, kBackwardPlanesBytes<Tile>, launch.stream,
          backward_planes_arguments<Tile>(p, operands, wanted, nullptr, scratch.residuals, scratch.marks),
          LogSumExp<Full>{}, scores_of(x));
    };
    // These two passes also sum the gradient of tables.
    const bool of_tables = x.d_table.present();
    if (plan.computed.rows || of_tables) pass(std::integral_constant<GradientOf, GradientOf::kRows>{});
    if (plan.computed.columns || of_tables) pass(std::integral_constant<GradientOf, GradientOf::kColumns>{});
    if (plan.computed.payload) pass(std::integral_constant<GradientOf, GradientOf::kPayload>{});
    const SoftmaxRows<float> rows{known.lse, known.lse_low, known.centre.data};
    launch_loaded("repair_backward", kernel_of(x) + 3, repair_blocks(p, scratch.marks), kRepairThreads, 0,
                  launch.stream, repair_arguments(p, wanted, static_cast<float>(x.options.scale)),
                  LogSumExp<float>{}, program_scores<float>(x), rows, scratch.marks);
  };
  backward_passes<false>(x, launch, gradients);
}

}  // namespace monoidreduce::cuda::planes
