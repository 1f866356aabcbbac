#pragma once

#include <cstdint>

#include "monoidreduce/math.h"

namespace monoidreduce {

// ceil(all / most): how many parts of at most `most` each `all` is cut into.
constexpr std::int64_t parts_of(std::int64_t all, std::int64_t most) { return (all + most - 1) / most; }

// How a job (work tile) of columns is split: some of its query heads and of its row tiles are a part.
struct PartsOfJob {
  int heads = 1, rows = 1;  // into how many parts
  MR_HD int count() const { return heads * rows; }
};

}  // namespace monoidreduce
