#include "../../plan/tiles.h"
#include "../attention_passes.cuh"
#include "../engine.h"
#include "monoidreduce/launch/fold_few_rows_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

// As many stages as fit in shared memory: they are what is in flight from memory to an SM. B: the element
// type of score biases that come in tiles, or void.
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

static_assert(Tiles<void>::Width64::kColumns == tiles::kFewRowsColumns[0] &&
              Tiles<void>::Width128::kColumns == tiles::kFewRowsColumns[1] &&
              Tiles<void>::Width256::kColumns == tiles::kFewRowsColumns[2]);

}  // namespace

void attention_few_rows(const AttentionForward& x, const Packing& packing, const Launch& launch) {
  const std::int64_t width = std::max(x.q.size[3], x.v.size[3]);
  const FoldProblem problem = attention_problem(x);
  with_attention_rows<Biases::kTiles>(x, problem, [&](auto element, const auto& scores, const auto& rows) {
    using Tile = Tiles<BiasElement<std::decay_t<decltype(scores)>>>;
    const auto fold = [&](auto tile) {
      fold_few_rows<decltype(element), decltype(tile)>(LogSumExp<Bits>{}, scores, problem, packing, rows,
                                                       {x.out, x.out_low}, data<float>(x.scratch), launch);
    };
    if (width <= 64) return fold(typename Tile::Width64{});
    if (width <= 128) return fold(typename Tile::Width128{});
    fold(typename Tile::Width256{});
  });
  repair_attention(x, problem, launch);
}

}  // namespace monoidreduce::cuda::sm90
