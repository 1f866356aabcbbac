#pragma once

#include <cstdint>

namespace monoidreduce {

// The number of parts of at most `most` each that `all` is cut into.
constexpr std::int64_t parts_of(std::int64_t all, std::int64_t most) { return (all + most - 1) / most; }

// The size of the next part when `left` of `all` rows are left, in whole blocks. Parts shrink; the last one has at most a
// sixth of all rows.
constexpr std::int64_t falling_part(std::int64_t left, std::int64_t all, std::int64_t block) {
  const std::int64_t part = parts_of(3 * left, 5 * block) * block;
  return left <= all / 6 || part > left ? left : part;
}

}  // namespace monoidreduce
