// The stream-K tail of a backward pass on Hopper: how blocks share its last jobs (work tiles).
#pragma once

#include <cstdint>

#include "monoidreduce/device/schedule/stream_k_tail.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce {

// Whether the bias is a mask: a bool tensor, in which false masks an element.
inline bool excludes(const TensorView& bias) { return bias.present() && bias.dtype == DType::kBool; }

// Whether elements may be masked, by the column range or by the bias.
inline bool may_mask(const FoldProblem& p) { return !p.range.all() || excludes(p.bias); }

// How the jobs of the last wave are split, for attention without a mask. tile: rows and columns of a tile. A part of a job
// costs as much as two row tiles in addition to its own, about the cost of starting a block. (H100, width 128: 4.6 us, a tile
// takes 2.0; from whole backward passes of 2k and 4k tokens.)
//
// In the deterministic mode no job is split. Parts would start at the same time, in the middle of rows, and wait for the blocks
// that add to these rows before them. (16k tokens: 19 ms. A model with the same result puts more than half of that into the
// last of 16 waves.)
inline StreamKTail backward_stream_k_tail(TileSize tile, const FoldProblem& p, const DeviceFacts& gpu) {
  if (may_mask(p)) return {};
  return stream_k_tail(p.batch() * p.column_heads() * parts_of(p.columns(), tile.columns),
                       parts_of(p.rows(), tile.rows), gpu.multiprocessors, 2);
}

}  // namespace monoidreduce
