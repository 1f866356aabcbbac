// Kernels of attention with a function of its scores (score_mod, mask_mod) on Hopper: what NVRTC compiles,
// and the tiles with which the host launches.
#pragma once

#include <type_traits>

#include "monoidreduce/device/program/modified_scores.cuh"
#include "monoidreduce/device/resident/attend.cuh"
#include "monoidreduce/device/resident/fold_backward_sm90.cuh"
#include "monoidreduce/device/resident/fold_forward_sm90.cuh"

namespace monoidreduce::sm90 {

// By the larger width, 64 or 128: the tiles of plain attention, if a function leaves registers for them.
// Functions for packed sequences gather positions, and leave fewer. (NVRTC 13.0, width 64: with three
// consumers a function of four tensors spilled 128 bytes, and other functions none; for packed sequences,
// backward with 128 rows and a bias by distance spilled 724. With sums 256 wide, functions of several tensors
// spilled 100 bytes, with tiles of 64 columns and of 32.) kLean: for packed sequences, or with the gradient of
// tables: with 128 rows, that of a vector of rows and one of columns spilled 224.
template <int kWidth, bool kPacked>
using ModifiedForwardTile = ForwardTile<kWidth, kWidth, 128, kWidth == 64 && !kPacked ? 3 : 2, 2>;
template <int kWidth, bool kLean, RowSums kRowSums>
using ModifiedBackwardTile = BackwardTile<kWidth, kWidth == 64 && !kLean ? 128 : 64, false, kRowSums>;

}  // namespace monoidreduce::sm90
