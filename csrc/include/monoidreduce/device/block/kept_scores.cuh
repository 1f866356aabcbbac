// Scores of rows that keep only some of their columns, with a bit for each (KeptClasses in ops/log_probs.h). A score that is not
// kept is -inf.
#pragma once

#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/device/contraction/row_order.cuh"

namespace monoidreduce {

// A policy of fragment_scores.cuh, if its tiles hold dot products with a positive scale.
template <class R, class Scores>
struct KeptScores : Scores {
  const std::uint32_t* words;  // [rows, words_of_row]
  int words_of_row;
  int first;  // the bit of column 0
  RowOrder order;

  KeptScores(const Scores& scores, const std::uint32_t* words, std::int64_t words_of_row, std::int64_t first,
             const RowOrder& order)
      : Scores(scores),
        words(words),
        words_of_row(static_cast<int>(words_of_row)),
        first(static_cast<int>(first)),
        order(order) {}

  template <int kSize>
  __device__ __forceinline__ void prepare(float (&tile)[kSize], int row0, int column0) const {
    constexpr int kColumns = kSize * 2, kWords = kColumns / 32;
    static_assert(kColumns % 32 == 0);
    const unsigned last = words_of_row - 1;
    Scores::prepare(tile, row0, column0);
    const unsigned bit = first + column0, lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t* const of_row =
          words + order[::min(row0 + fragment_row(r), order.rows - 1)] * words_of_row;
      // The four lanes of a row hold a quarter of its words each, which takes fewer registers.
      std::uint32_t held[kWords / 4 + 1];
#pragma unroll
      for (int n = 0; n <= kWords / 4; ++n) held[n] = of_row[::min(bit / 32 + n * 4 + lane, last)];
      std::uint32_t word = __shfl_sync(0xffffffffu, held[0], 0, 4);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        // Column 0 of the tile may be any bit of its word. So 32 columns lie in two words.
        const std::uint32_t next = __shfl_sync(0xffffffffu, held[(w + 1) / 4], (w + 1) % 4, 4),
                            bits = __funnelshift_r(word, next, bit % 32) >> (lane * 2);
        word = next;
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // the row's elements in these columns
          float& x = tile[w * 16 + i / 2 * 4 + r * 2 + i % 2];
          x = bits >> (i / 2 * 8 + i % 2) & 1 ? x : -INFINITY;
        }
      }
    }
  }
  // A score of -inf has g = 0: without the select, g could become NaN.
  __device__ __forceinline__ R chain(R g, R score, int i) const {
    return select(g == R(0), g, Scores::chain(g, score, i));
  }
};

}  // namespace monoidreduce
