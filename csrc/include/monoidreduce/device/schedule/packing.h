// Packing for few rows, as in decoding: rows of several heads share a tile (PackGQA), and its columns are
// split between blocks (split-KV).
#pragma once

namespace monoidreduce {

// Row `row` of head `head` is line head * rows + row of its tile. A tile has at most kPackedLines lines.
struct Packing {
  int heads, rows;  // heads that share a tile (and a column head), and rows of each
  int splits;       // jobs among which the columns of a tile are split
};
inline constexpr int kPackedLines = 64;

}  // namespace monoidreduce
