// The kernels of attention whose scores functions modify: what NVRTC compiles, and the tiles that the host launches.
#pragma once

#include <type_traits>

#include "monoidreduce/device/program/modified_scores.cuh"
#include "monoidreduce/device/resident/attend.cuh"
#include "monoidreduce/device/resident/fold_backward_sm80.cuh"
#include "monoidreduce/device/resident/fold_forward_sm80.cuh"

namespace monoidreduce::sm80 {

// By the larger width, 64, 128 or 256. A function takes registers, as a bias of each element does, so both
// have the same tiles. One differs: forward, with width 128, it has 32 columns in place of 64. Up to that
// width tiles fit any GPU's shared memory.
template <int kWidth>
using ModifiedForwardTile = std::conditional_t<
    kWidth == 64, ForwardTile<64, 64, 2, 3, 2>,
    std::conditional_t<kWidth == 128, ForwardTile<128, 32, 2, 2, 2>, ForwardTile<256, 64, 1, 2, 2>>>;
template <int kWidth>
using ModifiedBackwardTile =
    std::conditional_t<kWidth == 64, BackwardTile<64, 64, 64, 4, 1, 2, false>,
                       std::conditional_t<kWidth == 128, BackwardTile<128, 64, 64, 4, 1, 2, false>,
                                          BackwardTile<256, 64, 64, 8, 1, 1, false>>>;

}  // namespace monoidreduce::sm80
