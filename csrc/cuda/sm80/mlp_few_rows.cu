#include "../mlp.h"

#include "../mlp_passes.cuh"
#include "../tensor_cores.h"
#include "monoidreduce/launch/fold_forward_sm80.cuh"
#include "tiles.h"

namespace monoidreduce::cuda::sm80 {
namespace {

using namespace monoidreduce::sm80;

template <class E, class Run>
void with_tile(const FoldProblem& p, Run run) {
  with_forward_tile<MlpForwardTiles<E>>(std::max(p.width(), p.payload_width()), run);
}

}  // namespace

// Tiles of rows are those of many rows, and only splits make more blocks of them.
std::optional<Packing> mlp_few_rows(const FoldProblem& p) {
  Packing packing{1, 0, 1};
  HalvesAndFloat::with(p.a.dtype, [&](auto element) {
    with_tile<decltype(element)>(p, [&](auto tile) {
      const int places = multiprocessors(p.a.cuda_device) * tile.kBlocks;
      packing.rows = tile.kRows;
      const std::int64_t row_tiles = parts_of(p.rows(), tile.kRows);
      if (leave_half_idle(row_tiles, places))
        packing.splits = splits_of(row_tiles, parts_of(p.columns(), tile.kColumns), places, most_splits(p));
    });
  });
  return packing.splits > 1 ? std::optional(packing) : std::nullopt;
}

void mlp_few_rows(const MlpForward& x, const Packing& packing, const Launch& launch) {
  mlp_forward_pass<HalvesAndFloat>(x, [&](auto element, const auto& m, const auto& scores,
                                          const auto& problem, const auto& rows, const TensorView& out) {
    using E = decltype(element);
    with_tile<E>(problem, [&](auto tile) {
      fold_few_rows<E, decltype(tile)>(m, scores, problem, packing.splits, rows, out, data<float>(x.scratch),
                                       launch);
    });
  });
}

}  // namespace monoidreduce::cuda::sm80
