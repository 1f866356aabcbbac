// Few rows, as in decoding: rows of several heads share a tile (PackGQA), and its columns are split (split-KV).
#pragma once

namespace monoidreduce {

// The line of a row in its tile is head * rows + row. A tile has at most kPackedLines lines.
struct Packing {
  int heads, rows;  // of a tile: heads that share a column head, rows of each
  int splits;       // jobs that share the columns of a tile
};
inline constexpr int kPackedLines = 64;

}  // namespace monoidreduce
