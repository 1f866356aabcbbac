// Kernels of attention with a function of its scores (score_mod, mask_mod) on Hopper for float32 operands in planes:
// what NVRTC compiles, and the tiles with which the host launches.
#pragma once

#include "monoidreduce/device/resident/attend.cuh"
#include "monoidreduce/device/resident/fold_backward_planes_sm90.cuh"
#include "monoidreduce/device/resident/fold_forward_planes_sm90.cuh"
#include "monoidreduce/device/resident/repair.cuh"
#include "monoidreduce/device/simt/modified_simt.cuh"

namespace monoidreduce::planes {

// By the larger width, 64 or 128.
template <int kWidth>
using ModifiedForwardTile = sm90::PlanesTile<kWidth, 2, kWidth == 64 ? 4 : 2>;
// One stage for each stream, where there is no space for two, as without functions.
template <sm90::GradientOf kOf, int kWidth>
using ModifiedPassTile =
    sm90::PlanesPassTile<kOf, kWidth, kWidth == 64 || kOf == sm90::GradientOf::kPayload ? 2 : 1, false>;

}  // namespace monoidreduce::planes
