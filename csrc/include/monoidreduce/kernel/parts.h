#pragma once

#include <cstdint>

namespace monoidreduce {

// How many parts of at most so many something is.
constexpr std::int64_t parts_of(std::int64_t all, std::int64_t most) { return (all + most - 1) / most; }

// How many of the rows that are left come next, in blocks: fewer every time, and at last a sixth of all or less.
constexpr std::int64_t falling_part(std::int64_t left, std::int64_t all, std::int64_t block) {
  const std::int64_t part = parts_of(3 * left, 5 * block) * block;
  return left <= all / 6 || part > left ? left : part;
}

}  // namespace monoidreduce
