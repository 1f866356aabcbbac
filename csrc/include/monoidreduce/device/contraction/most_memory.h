// What the k largest values of rows need (most.cuh), as far as the host knows it: memory, and elements.
#pragma once

#include <cstdint>

#include "monoidreduce/monoid.h"

namespace monoidreduce {

inline constexpr int kMostKept = 64;  // elements that a list keeps in order: the largest k
inline constexpr int kMostColumns =
    128;  // after which lists are sorted where they have too many fresh elements
inline constexpr int kRowsOfLock = 16;

// An element as one integer: the larger one has the larger value or, of equal values, the lower column. NaN is
// the largest value. 0 stands for no element.
using RankedElement = std::uint64_t;

MR_HD std::uint32_t rank_of_value(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x + 0.f);  // of -0 those of 0
  if (x != x) return 0xffffffffu;
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
MR_HD RankedElement ranked(float value, std::int64_t column) {
  return RankedElement{rank_of_value(value)} << 32 | static_cast<std::uint32_t>(~column);
}
MR_HD float value_of(RankedElement x) {
  const auto rank = static_cast<std::uint32_t>(x >> 32);
  return __builtin_bit_cast(float, rank >> 31 != 0 ? rank & 0x7fffffffu : ~rank);
}
MR_HD std::int64_t column_of(RankedElement x) { return static_cast<std::uint32_t>(~x); }

// The memory of a call. best: [rows, kMostKept] in order, initially 0. locks: of kRowsOfLock rows each,
// initially 0. lists: [clusters, shares, row_block, pitch]: what a warp keeps while it folds; a list has kMostKept
// elements in order, and room for fresh ones of four lanes. slack: fresh elements of a row, of all lanes, that need
// not be sorted yet. blocks: blocks of a cluster.
struct MostMemory {
  RankedElement *best, *lists;
  unsigned* locks;
  std::int64_t rows;
  int blocks, shares, row_block, pitch, slack;
};

}  // namespace monoidreduce
