// The tiles with which Hopper's contraction runs programs. Both the host and generated sources include this.
#pragma once

#include "monoidreduce/device/contraction/contraction_sm90.cuh"
#include "monoidreduce/device/contraction/program_epilogue.cuh"

namespace monoidreduce::sm90 {

// kRowBlock: rows of a cluster, 256 or 128.
template <int kScores, int kRowBlock>
using ProgramFoldTile =
    std::conditional_t<kScores == 1, ContractionTile<256, 4, 1, false, 1, kRowBlock / 128>,
                       ContractionTile<192, 5, 2, false, 1, kRowBlock / 128>>;
// kOuts: for how many of the scores there are gradients. With gradients of both scores, a tile of 192 columns
// spilled 708 bytes (KL both ways and chi2).
template <int kScores, int kOuts>
using ProgramGradientTile = std::conditional_t<
    kScores == 1, ContractionTile<256, 4>,
    std::conditional_t<kOuts == 1, ContractionTile<192, 4, 2>, ContractionTile<128, 5, 2>>>;

}  // namespace monoidreduce::sm90
