// How blocks share the last jobs of a backward pass on Hopper.
#pragma once

#include <cstdint>

#include "monoidreduce/device/schedule/last_round.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce {

// Whether the bias is a mask: bool, false excludes an element.
inline bool excludes(const TensorView& bias) { return bias.present() && bias.dtype == DType::kBool; }

// Whether the window or the bias excludes any element.
inline bool is_partial(const FoldProblem& p) { return !p.range.all() || excludes(p.bias); }

// How the jobs of the last wave, of tiles of so many rows and columns, are split: for attention without a mask. A part costs two
// tiles of rows more than its own, as much as starting a block. (H100, width 128: 4.6 us, a tile 2.0; from whole backward passes
// of 2k and 4k tokens.)
//
// In turn no job is split. Parts would start at the same time, in the middle of rows for which they have to wait. (16k: 19 ms;
// a model with the same result puts more than half of that into the last of 16 waves.)
inline LastRound backward_last_round(TileSize tile, const FoldProblem& p, const DeviceFacts& gpu) {
  if (is_partial(p)) return {};
  return last_round(p.batch() * p.column_heads() * parts_of(p.columns(), tile.columns),
                    parts_of(p.rows(), tile.rows), gpu.multiprocessors, 2);
}

}  // namespace monoidreduce
