// The tiles with which sm_80's contraction runs programs. Both the host and generated sources include this.
#pragma once

#include "monoidreduce/device/contraction/contraction_sm80.cuh"
#include "monoidreduce/device/contraction/program_epilogue.cuh"

namespace monoidreduce::sm80 {

template <int kScores, int /*kRowBlock, 256*/>
using ProgramFoldTile =
    std::conditional_t<kScores == 1, ContractionTile<2>, ContractionTile<2, 2, false, true>>;
template <int kScores, int>
using ProgramGradientTile = std::conditional_t<kScores == 1, ContractionTile<2>, ContractionTile<3, 2>>;

}  // namespace monoidreduce::sm80
