#include "../attention_passes.cuh"
#include "../tensor_cores.h"
#include "monoidreduce/launch/fold_few_rows_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

// As many stages as shared memory holds: what is on its way from memory to a multiprocessor.
// B: element type of biases of scores, or void.
template <class B>
struct Tiles {
  using Width64 = ForwardTile<64, 64, 128, 1, 4>;
  using Width128 = ForwardTile<128, 128, 64, 1, 5>;
  using Width256 = ForwardTile<256, 256, 64, 1, 2>;
};
template <>
struct Tiles<void> {
  using Width64 = ForwardTile<64, 64, 128, 1, 6>;
  using Width128 = ForwardTile<128, 128, 128, 1, 3>;
  using Width256 = ForwardTile<256, 256, 64, 1, 3>;
};

// Columns of a tile without biases.
int column_tile(std::int64_t width) {
  if (width <= 64) return Tiles<void>::Width64::kColumns;
  return width <= 128 ? Tiles<void>::Width128::kColumns : Tiles<void>::Width256::kColumns;
}

}  // namespace

std::optional<Packing> few_rows(const FoldProblem& p) {
  return pack_few_rows(p, column_tile(std::max(p.width(), p.payload_width())),
                       multiprocessors(p.a.cuda_device));
}

std::int64_t few_rows_scratch(const FoldProblem& p, const Packing& packing) {
  return packing.splits == 1 ? 0 : partial_rows_floats<LogSumExp<Bits>>(p, packing.splits);
}

void attention_few_rows(const AttentionForward& x, const Packing& packing, const Launch& launch) {
  const std::int64_t width = std::max(x.q.size[3], x.v.size[3]);
  attention_forward_passes<Biases::kTiles>(
      x, launch, [&](auto element, const auto& scores, const auto& problem, const auto& rows) {
        using Tile = Tiles<BiasElement<std::decay_t<decltype(scores)>>>;
        const auto fold = [&](auto tile) {
          fold_few_rows<decltype(element), decltype(tile)>(LogSumExp<Bits>{}, scores, problem, packing, rows,
                                                           x.out, data<float>(x.scratch), launch);
        };
        if (width <= 64) return fold(typename Tile::Width64{});
        if (width <= 128) return fold(typename Tile::Width128{});
        fold(typename Tile::Width256{});
      });
}

}  // namespace monoidreduce::cuda::sm90
