// Attention whose scores functions modify: launches of kernels that were compiled for the functions.
#include "../attention_passes.cuh"
#include "../engine.h"
#include "monoidreduce/device/resident/modified_sm80.cuh"
#include "monoidreduce/launch/fold_backward_sm80.cuh"
#include "monoidreduce/launch/fold_forward_sm80.cuh"
#include "monoidreduce/launch/loaded_kernels.cuh"

namespace monoidreduce::cuda::sm80 {
namespace {

using namespace monoidreduce::sm80;

// ModifiedScores of any program.
template <class Call>
ModifiedScoresData scores_of(const Call& x) {
  const auto count = [](const TensorView& t) { return t.present() ? t.size[0] : std::int64_t{0}; };
  ModifiedScoresData scores{
      .tables = {x.table.data, data<std::int64_t>(x.table_index), count(x.table), count(x.table_index)},
      .kinds = data<std::int64_t>(x.blocks),
      .kinds_stride = {x.blocks.stride[0], x.blocks.stride[1], x.blocks.stride[2], x.blocks.stride[3]},
      .block_rows = static_cast<int>(x.options.block_rows),
      .block_columns = static_cast<int>(x.options.block_columns),
      .rows = static_cast<int>(x.q.size[2]),
      .columns = static_cast<int>(x.k.size[2]),
      .scale = static_cast<float>(x.options.scale),
      .size = {}};
  require(x.sizes.size() <= ModifiedScoresData::kMostSizes, "sizes: expected at most ",
          ModifiedScoresData::kMostSizes, ", got ", x.sizes.size());
  std::copy(x.sizes.begin(), x.sizes.end(), scores.size);
  return scores;
}

// Calls run(tile) with the tile for a problem's larger width.
template <template <int> class Tile, class Run>
void with_modified_tile(const FoldProblem& p, Run run) {
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (width <= 64) return run(Tile<64>{});
  if (width <= 128) return run(Tile<128>{});
  run(Tile<256>{});
}

}  // namespace

void modified_attention_fold(const ModifiedAttentionFold& x, const Plan&, const Launch& launch) {
  const FoldProblem p = modified_problem(x);
  const DeviceGuard device(x.q.cuda_device);
  Halves::with(x.q.dtype, [&](auto element) {
    using E = decltype(element);
    with_modified_tile<ModifiedForwardTile>(p, [&](auto tile) {
      using Tile = decltype(tile);
      launch_loaded("modified_attention_fold", x.kernel, forward_blocks<Tile>(p), Tile::kThreads,
                    sizeof(ForwardMemory<E, Tile>), launch.stream,
                    forward_arguments<Tile>(p, forward_shape<E>(p), {x.out, x.out_low}), LogSumExp<Bits>{},
                    scores_of(x), AttentionRows{data<float>(x.lse), data<float>(x.lse_low)});
    });
  });
}

void modified_attention_pull(const ModifiedAttentionPull& x, const Plan& plan, const Launch& launch) {
  const FoldProblem p = modified_problem(x);
  const BackwardScratch scratch(x, plan.sharing);
  const float scale = static_cast<float>(x.options.scale);
  const FoldGradients wanted{.grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v};
  const DeviceGuard device(x.q.cuda_device);
  Halves::with(x.q.dtype, [&](auto element) {
    using E = decltype(element);
    prepare_rows<E>({x.grad_out, x.out, x.out_low, x.lse, x.grad_lse, scale, x.k.size[1], is_partial(p)},
                    scratch.residuals, scratch.marks, scratch.cleared, launch);
    with_modified_tile<ModifiedBackwardTile>(p, [&](auto tile) {
      using Tile = decltype(tile);
      launch_loaded("modified_attention_pull", x.kernel, blocks_for(backward_tiles<Tile>(p)), Tile::kThreads,
                    sizeof(BackwardMemory<E, Tile>), launch.stream,
                    backward_arguments<Tile>(p, wanted, scratch.residuals, scratch.marks, scratch.turns, 1),
                    LogSumExp<Bits>{}, scores_of(x));
    });
  });
}

}  // namespace monoidreduce::cuda::sm80
