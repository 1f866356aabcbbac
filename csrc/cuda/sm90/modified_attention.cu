#include "../modified_passes.cuh"
#include "monoidreduce/device/resident/modified_sm90.cuh"
#include "monoidreduce/launch/fold_backward_sm90.cuh"
#include "monoidreduce/launch/fold_forward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;
using enum RowSums;

template <int kWidth>
constexpr bool planned() {
  using Forward = ModifiedForwardTile<kWidth>;
  using Backward = ModifiedBackwardTile<kWidth, kAnyOrder>;
  using Parts = ColumnHandover<Backward>;
  return Forward::kRows == tiles::kModifiedForward.rows &&
         Forward::kColumns == tiles::kModifiedForward.columns &&
         Backward::kRows == tiles::kModifiedBackward.rows &&
         Backward::kColumns == tiles::kModifiedBackward.columns &&
         Parts::kThreads == tiles::kHandingThreads &&
         Parts::kOfBlock == tiles::kHandingThreads * tiles::handed_quads(kWidth);
}
static_assert(planned<64>() && planned<128>());

// Calls run(width) with 64 or 128, the larger width rounded up.
template <class Run>
void with_width(const FoldProblem& p, Run run) {
  if (std::max(p.width(), p.payload_width()) <= 64) return run(std::integral_constant<int, 64>{});
  run(std::integral_constant<int, 128>{});
}

}  // namespace

void modified_attention_fold(const ModifiedAttentionFold& x, const Plan& plan, const Launch& launch) {
  auto* const counter = plan.scratch > 0 ? data<unsigned long long>(x.scratch) : nullptr;
  const FoldProblem p = modified_problem(x);
  const DeviceGuard device(x.q.cuda_device);
  Halves::with(x.q.dtype, [&](auto element) {
    with_width(p, [&](auto width) {
      using Tile = ModifiedForwardTile<width()>;
      launch_loaded(
          "modified_attention_fold", x.kernel, forward_blocks<Tile>(p), Tile::kThreads,
          kForwardBytes<Tile, void>, launch.stream,
          forward_arguments<decltype(element), Tile, void>(p, {x.out, x.out_low}, counter, launch),
          LogSumExp<Bits>{}, scores_of(x), AttentionRows{data<float>(x.lse), data<float>(x.lse_low)});
    });
  });
}

void modified_attention_pull(const ModifiedAttentionPull& x, const Plan& plan, const Launch& launch) {
  const auto run = [&](auto element, const FoldProblem& p, const FoldGradients& wanted,
                       const BackwardScratch& scratch) {
    const auto pull = [&]<class Tile>(Tile) {
      const auto arguments = backward_arguments<decltype(element), Tile, void>(
          p, is_even(x), wanted, scratch.residuals, scratch.marks, scratch.turns, scratch.sharing);
      launch_loaded("modified_attention_pull", x.kernel,
                    backward_blocks<Tile>(arguments.jobs, x.q.cuda_device), Tile::kThreads,
                    kBackwardBytes<Tile, void>, launch.stream, arguments, LogSumExp<Bits>{}, scores_of(x));
    };
    with_width(p, [&](auto width) {
      if (plan.sharing.in_turn) return pull(ModifiedBackwardTile<width(), kInTurn>{});
      pull(ModifiedBackwardTile<width(), kAnyOrder>{});
    });
  };
  modified_backward_passes(x, plan.sharing, launch, run);
}

}  // namespace monoidreduce::cuda::sm90
