// The kernels of attention whose scores functions modify, on Hopper: what NVRTC compiles, and the tiles that the host launches.
#pragma once

#include <type_traits>

#include "monoidreduce/device/program/modified_scores.cuh"
#include "monoidreduce/device/resident/attention_rows.cuh"
#include "monoidreduce/device/resident/fold_backward_sm90.cuh"
#include "monoidreduce/device/resident/fold_forward_sm90.cuh"

namespace monoidreduce::sm90 {

// By the larger width, 64 or 128. A function takes registers, so tiles are those of softcapped scores and of biases. (Functions
// of several tensors, beside sums 256 wide, spilled 100 bytes with tiles of 64 columns and of 32.)
template <int kWidth>
using ModifiedForwardTile = ForwardTile<kWidth, kWidth, 128, 2, 2>;
template <int kWidth, RowSums kRowSums>
using ModifiedBackwardTile = BackwardTile<kWidth, 64, false, kRowSums>;

}  // namespace monoidreduce::sm90
