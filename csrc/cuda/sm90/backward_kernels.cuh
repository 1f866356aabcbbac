// Chooses the kernels of a backward fold on Hopper, by width and mode.
#pragma once

#include "../../plan/tiles.h"
#include "../engine.h"
#include "../mlp.h"
#include "monoidreduce/launch/fold_backward_pass_sm90.cuh"
#include "monoidreduce/launch/fold_backward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {

template <auto kValue>
inline constexpr std::integral_constant<decltype(kValue), kValue> constant;

// The tile of the kernel for all gradients at once, for widths up to 128. Score biases take shared memory.
template <int kWidth, bool kBiased, bool kTransposed, monoidreduce::sm90::RowSums kRowSums>
using TileAtOnce =
    monoidreduce::sm90::BackwardTile<kWidth, kWidth == 64 && !kBiased ? 128 : 64, kTransposed, kRowSums>;

// The tile of the kernel for one gradient, for any width.
using TileOfPass = monoidreduce::sm90::PassTile<monoidreduce::sm90::GradientOf::kRows, 256, false>;
static_assert(TileOfPass::kStaying == tiles::kPass.staying && TileOfPass::kStreamed == tiles::kPass.streamed);

// wanted: in attention without a score bias some gradients may be absent, as the plan says; otherwise all are
// present.
//
// turns, sharing: as fold_backward takes them. kTransposed: the payload and its gradient are [payload width,
// columns] in memory, as in the MLP. The MLP's deterministic mode uses no semaphores (turns): all of its
// blocks add to the same rows, so each would wait for the one before. At width 128, 16384 rows and units, it
// took 0.85 ms with them and 0.78 with a pass of its own for the rows' gradient (H100).
template <class E, bool kTransposed, PayloadMonoid M, class Scores>
void backward_kernels(const M& m, const Scores& scores, const FoldProblem& p, const FoldGradients& wanted,
                      const RowResiduals& residuals, const RowMarks& marks, const RowSemaphores& turns,
                      float* sharing, const Launch& launch) {
  using namespace monoidreduce::sm90;
  using enum GradientOf;
  const auto pass = [&]<class... Tiles>(Tiles...) {
    fold_backward_pass<E, Tiles...>(m, scores, p, wanted, residuals, marks, launch);
  };
  const auto passes = [&](auto width) {
    pass(PassTile<kRows, width(), kTransposed>{}, PassTile<kColumns, width(), kTransposed>{},
         PassTile<kPayload, width(), kTransposed>{});
  };
  constexpr bool kBiased = kBiasedByTile<Scores>;
  const auto at_once = [&](auto width) {
    const auto run = [&](const auto& m, auto row_sums) {
      using Tile = TileAtOnce<width(), kBiased, kTransposed, row_sums()>;
      fold_backward<E, Tile>(m, scores, p, wanted, residuals, marks, turns, sharing, launch);
    };
    if constexpr (!kTransposed && !kBiased) {
      if (!wanted.d_b.present()) return pass(PassTile<kRows, width(), false>{});
      if (!wanted.d_a.present()) return run(m, constant<RowSums::kElsewhere>);
    }
    if (!launch.deterministic)
      return with_own_kernel(m, [&](const auto& own) { run(own, constant<RowSums::kAnyOrder>); });
    if constexpr (kTransposed) {
      pass(PassTile<kRows, width(), kTransposed>{});
      run(m, constant<RowSums::kElsewhere>);
    } else {
      run(m, constant<RowSums::kInTurn>);
    }
  };
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (kBiased || width <= 128) {  // with biases, there are no passes for one gradient
    if (width <= 64) return at_once(constant<64>);
    return at_once(constant<128>);
  }
  if constexpr (!kBiased) {
    if (width <= 192) return passes(constant<192>);
    passes(constant<256>);
  }
}

}  // namespace monoidreduce::cuda::sm90
