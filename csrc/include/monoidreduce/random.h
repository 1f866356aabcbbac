// The random numbers of `mr.stat.uniform`: a function of a seed, the indices of a row and the column, so that each pass and each
// engine finds the same ones. monoidreduce/folds/program/streams.py computes the same in torch.
//
// The bits are Philox2x32 of the counter (column, row); of dropout's numbers, of (row, column). Its key, and what is xored to the
// second index, is a hash of the seed and of the row's other indices. Seven rounds are what passes BigCrush (Salmon et al.,
// Parallel Random Numbers: As Easy as 1, 2, 3, 2011). On a GPU a round is a product and an xor, and nothing else is computed for
// each row or column. A product's two words serve two columns that are 8 apart, or with 16 bits for each number (dropout) also two
// rows that are 8 apart: a thread has all of them, whether a tensor core's tile is one of scores or of transposed scores.
#pragma once

#include <cstdint>

#include "monoidreduce/monoid.h"

namespace monoidreduce {

// A hash of the seed, and of the number of the row's leading indices but the last: the finalizer of SplitMix64.
MR_HD constexpr std::int64_t wide_stream(std::int64_t seed, std::int64_t leading) {
  std::uint64_t x = static_cast<std::uint64_t>(seed) + 0x9e3779b97f4a7c15u;
  x += static_cast<std::uint64_t>(leading) * 0xd1342543de82ef95u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return static_cast<std::int64_t>(x ^ x >> 31);
}

// The product of Philox in two words: one instruction of a GPU, which the compiler often misses otherwise. With a product of
// 64 bits kernels of attention had up to 180 more instructions for 64 elements, with two of 32 bits up to 70 (NVRTC 13.0, sm_90a).
MR_HD void multiply_wide(std::uint32_t x, std::uint32_t& high, std::uint32_t& low) {
#if defined(__CUDA_ARCH__)
  std::uint64_t both;
  asm("mul.wide.u32 %0, %1, 0xd256d193;" : "=l"(both) : "r"(x));
  high = static_cast<std::uint32_t>(both >> 32), low = static_cast<std::uint32_t>(both);
#else
  const std::uint64_t product = std::uint64_t{0xd256d193u} * x;
  high = static_cast<std::uint32_t>(product >> 32), low = static_cast<std::uint32_t>(product);
#endif
}

// An index of a row or column in two parts: without bit 3, and this bit. Indices that are 8 apart share what is computed of the
// first part; the compiler computes it once if it knows the bit of each.
struct Paired {
  std::uint32_t pair;
  bool second;
  MR_HD constexpr Paired(std::int64_t pair, bool second)
      : pair(static_cast<std::uint32_t>(pair)), second(second) {}
  MR_HD constexpr Paired(std::int64_t index) : Paired(index & ~std::int64_t{8}, (index & 8) != 0) {}
};

// 32 random bits: one of the two words of the counter (paired.pair, other). The bit that `paired` leaves out says which.
MR_HD std::uint32_t random_word(std::int64_t stream, Paired paired, std::int64_t other) {
  const auto hash = static_cast<std::uint64_t>(stream);
  auto key = static_cast<std::uint32_t>(hash);
  std::uint32_t left = paired.pair,
                right = static_cast<std::uint32_t>(hash >> 32) ^ static_cast<std::uint32_t>(other);
  MR_UNROLL for (int round = 0; round < 7; ++round, key += 0x9e3779b9u) {
    std::uint32_t high, low;
    multiply_wide(left, high, low);
    left = high ^ key ^ right, right = low;
  }
  return paired.second ? right : left;
}

// A number in (0, 1): (n + 1/2) / 2^23 for 23 random bits n, which float represents exactly.
template <class R>
MR_HD R uniform(std::int64_t stream, std::int64_t row, Paired column) {
  const std::uint32_t word = random_word(stream, column, row);
  const float from_one = __builtin_bit_cast(float, word >> 9 | 0x3f800000u);  // 1 + n / 2^23
  return R(from_one - 0x1.fffffep-1f);                                        // less 1 - 2^-24
}

// A whole number of 16 bits: half of a word, whose counter is (row, column), so that four elements share it. (With the counter
// (column, row) a forward pass of attention took 15 instructions of 540 more, for 64 elements.)
template <class R>
MR_HD R uniform_16(std::int64_t stream, Paired row, Paired column) {
  const std::uint32_t word = random_word(stream, row, column.pair);
  return R(static_cast<float>(column.second ? word >> 16 : word & 0xffff));
}

// uniform_16 < limit, as a comparison of integers. limit: a whole number below 2^16.
template <class R>
MR_HD bool is_below(std::int64_t stream, Paired row, Paired column, R limit) {
  const std::uint32_t word = random_word(stream, row, column.pair);
  return (column.second ? word : word << 16) < static_cast<std::uint32_t>(limit) << 16;
}

}  // namespace monoidreduce
