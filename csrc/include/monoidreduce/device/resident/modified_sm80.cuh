// Kernels of attention with a function of its scores (score_mod, mask_mod): what NVRTC compiles, and the
// tiles with which the host launches.
#pragma once

#include <type_traits>

#include "monoidreduce/device/program/modified_scores.cuh"
#include "monoidreduce/device/resident/attend.cuh"
#include "monoidreduce/device/resident/fold_backward_sm80.cuh"
#include "monoidreduce/device/resident/fold_forward_sm80.cuh"

namespace monoidreduce::sm80 {

// By the larger width: 64, 128 or 256. A function takes as many registers as a bias of each element, so both
// have the same tiles, except forward at width 128, where a function has 32 columns instead of 64. Up to that
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
