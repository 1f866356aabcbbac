// The tiles of sm_80's contraction that run programs, for the host and for generated sources.
#pragma once

#include "monoidreduce/device/contraction/contraction_sm80.cuh"
#include "monoidreduce/device/contraction/program_epilogue.cuh"

namespace monoidreduce::sm80 {

template <int kScores>
using ProgramFoldTile =
    std::conditional_t<kScores == 1, ContractionTile<2>, ContractionTile<2, 2, false, true>>;
template <int kScores, int>
using ProgramGradientTile = std::conditional_t<kScores == 1, ContractionTile<2>, ContractionTile<3, 2>>;

}  // namespace monoidreduce::sm80
