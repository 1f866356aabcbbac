#pragma once

#include <cstdint>

namespace monoidreduce {

// How many parts of at most so many something is.
constexpr std::int64_t parts_of(std::int64_t all, std::int64_t most) { return (all + most - 1) / most; }

}  // namespace monoidreduce
