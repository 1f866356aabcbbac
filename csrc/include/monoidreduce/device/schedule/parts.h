#pragma once

#include <cstdint>

namespace monoidreduce {

// ceil(all / most): how many parts of at most `most` each `all` is cut into.
constexpr std::int64_t parts_of(std::int64_t all, std::int64_t most) { return (all + most - 1) / most; }

}  // namespace monoidreduce
