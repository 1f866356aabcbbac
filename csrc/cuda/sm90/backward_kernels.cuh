// The kernels that a backward fold takes on Hopper, by width and mode.
#pragma once

#include "../tensor_cores.h"
#include "monoidreduce/kernel/fold_backward_pass_sm90.cuh"
#include "monoidreduce/kernel/fold_backward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {

template <int kNumber>
inline constexpr std::integral_constant<int, kNumber> number;

// kTransposed: do the payload and its gradient lie with their columns adjacent.
template <class E, bool kTransposed, PayloadMonoid M, class Scores>
void backward_kernels(const M& m, const Scores& scores, const FoldProblem& p, const FoldGradients& wanted,
                      const RowResiduals& residuals, const RowMarks& marks, const Launch& launch) {
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
  const auto at_once = [&](auto width, auto rows) {
    if (backward_adds_rows(p, launch)) {
      using Tile = BackwardTile<width(), rows(), kTransposed, true>;
      return fold_backward<E, Tile>(m, scores, p, wanted, residuals, marks, launch);
    }
    pass(PassTile<kRows, width(), kTransposed>{});
    using Tile = BackwardTile<width(), rows(), kTransposed, false>;
    fold_backward<E, Tile>(m, scores, p, wanted, residuals, marks, launch);
  };
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if constexpr (kBiasedByTile<Scores>) {  // take shared memory, and have no passes of the columns
    return width <= 64 ? at_once(number<64>, number<64>) : at_once(number<128>, number<64>);
  } else {
    if (width <= 64) return at_once(number<64>, number<128>);
    if (width <= 128) return at_once(number<128>, number<64>);
    // The MLP has eight activations: too many kernels for what a width of 192 saves.
    if constexpr (!kTransposed) {
      if (width <= 192) return three_passes(number<192>);
    }
    three_passes(number<256>);
  }
}

}  // namespace monoidreduce::cuda::sm90
