// Integer arithmetic of user programs (monoidreduce/folds/program/integers.py); floor division is floor_of_quotient in math.h.
// 64-bit arithmetic wraps on overflow.
#pragma once

#include <cstdint>

#include "monoidreduce/math.h"

namespace monoidreduce {

MR_HD constexpr std::int64_t wide_add(std::int64_t x, std::int64_t y) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(x) + static_cast<std::uint64_t>(y));
}
MR_HD constexpr std::int64_t wide_sub(std::int64_t x, std::int64_t y) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(x) - static_cast<std::uint64_t>(y));
}
MR_HD constexpr std::int64_t wide_mul(std::int64_t x, std::int64_t y) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(x) * static_cast<std::uint64_t>(y));
}

// The remainder of floor_of_quotient, with the sign of y. x if y is 0.
template <class I>
MR_HD I floor_remainder(I x, I y) {
  if (y == 0) return x;
  if (y == -1) return 0;
  const I rest = x % y;
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

// i as an index into an axis of this size: negative indices count from the end, and an index out of range is clamped. I may be
// a wider type than Size.
template <class I, class Size>
MR_HD constexpr Size within(I i, Size size) {
  const I from_0 = i < 0 ? i + size : i;
  return from_0 < 0 ? Size(0) : from_0 < size ? static_cast<Size>(from_0) : size - 1;
}
template <class I>
MR_HD constexpr I within_from_0(I i, I size) {
  return i < size ? i : size - 1;
}

}  // namespace monoidreduce
