#include "../attention_passes.cuh"
#include "../tensor_cores.h"
#include "backward_kernels.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

// Tiles of columns whose rows are in parts.
JobSharing columns_in_parts(const FoldProblem& p) {
  const auto parts = [&](auto width, auto biased) -> JobSharing {
    using Tile = TileAtOnce<width(), biased(), false, monoidreduce::sm90::RowSums::kAnyOrder>;
    const LastRound last = monoidreduce::sm90::backward_last_round<Tile>(p);
    using Parts = monoidreduce::sm90::ColumnHandover<Tile>;
    return {Parts::floats(last), Parts::words(last), last.jobs};
  };
  if (std::max(p.width(), p.payload_width()) > 64) return parts(constant<128>, std::false_type{});
  return p.bias.present() ? parts(constant<64>, std::true_type{}) : parts(constant<64>, std::false_type{});
}

}  // namespace

JobSharing backward_sharing(const FoldProblem& p, const Launch& launch) {
  if (!gradients_at_once(p)) return {};
  if (launch.deterministic) return {.in_turn = true};  // turns have a counter of their own
  if (!p.range.all()) return {.floats = 1, .words = 1};
  return columns_in_parts(p);
}

void attention_backward(const AttentionBackward& x, const Launch& launch) {
  const auto run = [&](auto element, const auto& scores, const auto& problem, const auto& wanted,
                       const BackwardScratch& scratch) {
    backward_kernels<decltype(element), false>(LogSumExp<Bits>{}, scores, problem, wanted, scratch.residuals,
                                               scratch.marks, scratch.turns, scratch.sharing, launch);
  };
  attention_backward_passes<Biases::kTiles>(x, backward_sharing(attention_problem(x), launch), launch, run);
}

}  // namespace monoidreduce::cuda::sm90
