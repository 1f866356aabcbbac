// The tiles with which Hopper's contraction runs programs on float32 operands in planes. Both the host and generated sources
// include this.
#pragma once

#include "monoidreduce/device/contraction/contraction_sm90.cuh"
#include "monoidreduce/device/contraction/program_epilogue.cuh"

namespace monoidreduce::planes {

using sm90::contraction_kernel;
template <int kScores, int>
using ProgramFoldTile = sm90::PlaneTile<kScores>;
template <int kScores, int>
using ProgramGradientTile = sm90::PlaneTile<kScores>;

}  // namespace monoidreduce::planes
