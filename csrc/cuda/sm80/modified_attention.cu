#include "../modified_passes.cuh"
#include "monoidreduce/device/resident/modified_sm80.cuh"
#include "monoidreduce/launch/fold_backward_sm80.cuh"
#include "monoidreduce/launch/fold_forward_sm80.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using namespace monoidreduce::sm80;

// Calls run(tile) with the tile for a problem's larger width.
template <template <int> class Tile, class Run>
void with_modified_tile(const FoldProblem& p, Run run) {
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (width <= 64) return run(Tile<64>{});
  if (width <= 128) return run(Tile<128>{});
  run(Tile<256>{});
}

}  // namespace

template <>
void run(const ModifiedAttentionForward& x, const Plan&, const Launch& launch) {
  const FoldProblem p = modified_problem(x);
  const DeviceGuard device(x.q.cuda_device);
  Halves::with(x.q.dtype, [&](auto element) {
    using E = decltype(element);
    with_modified_tile<ModifiedForwardTile>(p, [&](auto tile) {
      using Tile = decltype(tile);
      launch_loaded("modified_attention_forward", kernel_of(x), forward_blocks<Tile>(p), Tile::kThreads,
                    sizeof(ForwardMemory<E, Tile>), launch.stream,
                    forward_arguments<Tile>(p, forward_shape<E>(p), {x.out, x.out_low}), LogSumExp<Bits>{},
                    scores_of(x), attention_rows(x));
    });
  });
}

template <>
void run(const ModifiedAttentionBackward& x, const Plan& plan, const Launch& launch) {
  const auto run = [&](auto element, const FoldProblem& p, const FoldGradients& wanted,
                       const BackwardScratch& scratch) {
    using E = decltype(element);
    with_modified_tile<ModifiedBackwardTile>(p, [&](auto tile) {
      using Tile = decltype(tile);
      launch_loaded("modified_attention_backward", kernel_of(x), blocks_for(backward_tiles<Tile>(p)),
                    Tile::kThreads, sizeof(BackwardMemory<E, Tile>), launch.stream,
                    backward_arguments<Tile>(p, wanted, scratch.residuals, scratch.marks, scratch.turns, 1),
                    LogSumExp<Bits>{}, scores_of(x));
    });
  };
  modified_backward_passes(x, plan, launch, run);
}

}  // namespace monoidreduce::cuda::sm80
