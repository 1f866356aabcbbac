#include "../modified_passes.cuh"
#include "monoidreduce/device/resident/modified_sm90.cuh"
#include "monoidreduce/launch/fold_backward_sm90.cuh"
#include "monoidreduce/launch/fold_forward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;
using enum RowSums;

template <int kWidth, bool kPacked>
constexpr bool planned() {
  using Forward = ModifiedForwardTile<kWidth, kPacked>;
  using Backward = ModifiedBackwardTile<kWidth, kPacked, kAnyOrder>;
  using Parts = ColumnFixup<Backward>;
  const TileSize forward = tiles::modified_forward(kWidth, kPacked),
                 backward = tiles::modified_backward(kWidth, kPacked);
  return forward.rows == Forward::kRows && forward.columns == Forward::kColumns &&
         backward.rows == Backward::kRows && backward.columns == Backward::kColumns &&
         Parts::kThreads == tiles::kFixupThreads &&
         Parts::kOfSlot == tiles::kFixupThreads * tiles::fixup_quads(kWidth);
}
static_assert(planned<64, false>() && planned<64, true>() && planned<128, false>() && planned<128, true>());

// Calls run(width, lean) with both as constants: the larger width is rounded up to 64 or 128.
template <class Call, class Run>
void with_modified_tile(const Call& x, bool lean, Run run) {
  const auto with_width = [&](auto lean) {
    if (std::max(x.q.size[3], x.v.size[3]) <= 64) return run(std::integral_constant<int, 64>{}, lean);
    run(std::integral_constant<int, 128>{}, lean);
  };
  if (lean) return with_width(std::true_type{});
  with_width(std::false_type{});
}

}  // namespace

template <>
void run(const ModifiedAttentionForward& x, const Plan& plan, const Launch& launch) {
  auto* const counter = plan.scratch > 0 ? data<unsigned long long>(x.scratch) : nullptr;
  const FoldProblem p = modified_problem(x);
  const DeviceGuard device(x.q.cuda_device);
  Halves::with(x.q.dtype, [&](auto element) {
    with_modified_tile(x, x.row_spans.present(), [&](auto width, auto packed) {
      using Tile = ModifiedForwardTile<width(), packed()>;
      launch_loaded("modified_attention_forward", kernel_of(x), forward_blocks<Tile>(p), Tile::kThreads,
                    kForwardBytes<Tile, void>, launch.stream,
                    forward_arguments<decltype(element), Tile, void>(p, {x.out, x.out_low}, counter, launch),
                    LogSumExp<Bits>{}, scores_of(x), attention_rows(x));
    });
  });
}

template <>
void run(const ModifiedAttentionBackward& x, const Plan& plan, const Launch& launch) {
  const auto run = [&](auto element, const FoldProblem& p, const FoldGradients& wanted,
                       const BackwardScratch& scratch) {
    const auto pull = [&]<class Tile>(Tile) {
      const auto arguments = backward_arguments<decltype(element), Tile, void>(
          p, is_even(x), wanted, scratch.residuals, scratch.marks, scratch.turns, scratch.sharing);
      launch_loaded("modified_attention_backward", kernel_of(x),
                    backward_blocks<Tile>(arguments.jobs, x.q.cuda_device), Tile::kThreads,
                    kBackwardBytes<Tile, void>, launch.stream, arguments, LogSumExp<Bits>{}, scores_of(x));
    };
    with_modified_tile(x, takes_lean_tile(x), [&](auto width, auto lean) {
      if (plan.sharing.in_turn) return pull(ModifiedBackwardTile<width(), lean(), kInTurn>{});
      pull(ModifiedBackwardTile<width(), lean(), kAnyOrder>{});
    });
  };
  modified_backward_passes(x, plan, launch, run);
}

}  // namespace monoidreduce::cuda::sm90
