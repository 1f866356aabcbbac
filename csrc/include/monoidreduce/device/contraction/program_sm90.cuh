// The tiles of Hopper's contraction that run programs, for the host and for generated sources.
#pragma once

#include "monoidreduce/device/contraction/contraction_sm90.cuh"
#include "monoidreduce/device/contraction/program_epilogue.cuh"

namespace monoidreduce::sm90 {

template <int kScores>
using ProgramFoldTile = std::conditional_t<kScores == 1, ContractionTile<256, 4>, ContractionTile<192, 5, 2>>;
// kOuts: of how many scores there are gradients. Both of two by a tile of 192 columns spilled 708 bytes (KL both ways and chi2).
template <int kScores, int kOuts>
using ProgramGradientTile = std::conditional_t<
    kScores == 1, ContractionTile<256, 4>,
    std::conditional_t<kOuts == 1, ContractionTile<192, 4, 2>, ContractionTile<128, 5, 2>>>;

}  // namespace monoidreduce::sm90
