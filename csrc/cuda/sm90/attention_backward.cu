#include "../../plan/tiles.h"
#include "../attention_passes.cuh"
#include "../engine.h"
#include "backward_kernels.cuh"

namespace monoidreduce::cuda::sm90 {
// Whether csrc/plan assumes this kernel's tile, and the sizes of its handover (stream_k_fixup.cuh).
template <int kWidth, bool kBiased>
constexpr bool planned() {
  using Tile = TileAtOnce<kWidth, kBiased, false, monoidreduce::sm90::RowSums::kAnyOrder>;
  using Parts = monoidreduce::sm90::ColumnFixup<Tile>;
  const TileSize tile = tiles::at_once(kWidth, kBiased);
  return tile.rows == Tile::kRows && tile.columns == Tile::kColumns &&
         Parts::kThreads == tiles::kFixupThreads &&
         Parts::kOfSlot == tiles::kFixupThreads * tiles::fixup_quads(kWidth);
}
static_assert(planned<64, false>() && planned<64, true>() && planned<128, false>() && planned<128, true>());

template <>
void run(const AttentionBackward& x, const Plan& plan, const Launch& launch) {
  const auto run = [&](auto element, const auto& scores, const auto& problem, const auto& wanted,
                       const BackwardScratch& scratch) {
    backward_kernels<decltype(element), false>(LogSumExp<Bits>{}, scores, problem, wanted, scratch.residuals,
                                               scratch.marks, scratch.turns, scratch.sharing, launch);
  };
  attention_backward_passes<Biases::kTiles>(x, plan, launch, run);
}

}  // namespace monoidreduce::cuda::sm90
