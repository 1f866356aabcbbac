// The kernels that a backward fold takes on Hopper, by width and mode.
#pragma once

#include "../tensor_cores.h"
#include "monoidreduce/kernel/fold_backward_pass_sm90.cuh"
#include "monoidreduce/kernel/fold_backward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {

template <int kNumber>
inline constexpr std::integral_constant<int, kNumber> number;

// The tile of one kernel for all gradients, up to a width of 128. Biases of scores take shared memory.
template <int kWidth, bool kBiased, bool kTransposed, bool kAddsRows>
using TileAtOnce =
    monoidreduce::sm90::BackwardTile<kWidth, kWidth == 64 && !kBiased ? 128 : 64, kTransposed, kAddsRows>;

// Tiles of columns whose rows are in parts.
template <bool kTransposed>
JobSharing columns_in_parts(const FoldProblem& p) {
  const auto parts = [&](auto width, auto biased) -> JobSharing {
    using Tile = TileAtOnce<width(), biased(), kTransposed, true>;
    const LastRound last = monoidreduce::sm90::backward_last_round<Tile>(p);
    using Parts = monoidreduce::sm90::ColumnHandover<Tile>;
    return {Parts::floats(last), Parts::words(last), last.jobs};
  };
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (width > 128) return {};
  if (width > 64) return parts(number<128>, std::false_type{});
  return p.bias.present() ? parts(number<64>, std::true_type{}) : parts(number<64>, std::false_type{});
}

// sharing: as fold_backward takes it. kTransposed: do the payload and its gradient lie with their columns adjacent.
template <class E, bool kTransposed, PayloadMonoid M, class Scores>
void backward_kernels(const M& m, const Scores& scores, const FoldProblem& p, const FoldGradients& wanted,
                      const RowResiduals& residuals, const RowMarks& marks, float* sharing,
                      const Launch& launch) {
  using namespace monoidreduce::sm90;
  using enum GradientOf;
  const auto pass = [&](auto tile) {
    fold_backward_pass<E, decltype(tile)>(m, scores, p, wanted, residuals, marks, launch);
  };
  const auto three_passes = [&](auto width) {
    pass(PassTile<kRows, width(), kTransposed>{});
    pass(PassTile<kColumns, width(), kTransposed>{});
    pass(PassTile<kPayload, width(), kTransposed>{});
  };
  constexpr bool kBiased = kBiasedByTile<Scores>;
  const auto at_once = [&](auto width) {
    if (backward_adds_rows(p, launch)) {
      using Tile = TileAtOnce<width(), kBiased, kTransposed, true>;
      return fold_backward<E, Tile>(m, scores, p, wanted, residuals, marks, sharing, launch);
    }
    pass(PassTile<kRows, width(), kTransposed>{});
    using Tile = TileAtOnce<width(), kBiased, kTransposed, false>;
    fold_backward<E, Tile>(m, scores, p, wanted, residuals, marks, sharing, launch);
  };
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (kBiased || width <= 128) {  // biases have no passes of the columns
    if (width <= 64) return at_once(number<64>);
    return at_once(number<128>);
  }
  if constexpr (!kBiased) {
    // The MLP has eight activations: too many kernels for what a width of 192 saves.
    if constexpr (!kTransposed) {
      if (width <= 192) return three_passes(number<192>);
    }
    three_passes(number<256>);
  }
}

}  // namespace monoidreduce::cuda::sm90
