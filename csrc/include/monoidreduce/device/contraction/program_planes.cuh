// The tiles with which Hopper's contraction runs programs on float32 operands in planes. Both the host and generated sources
// include this.
#pragma once

#include "monoidreduce/device/contraction/contraction_sm90.cuh"
#include "monoidreduce/device/contraction/program_epilogue.cuh"

namespace monoidreduce::planes {

using sm90::contraction_kernel;
// Programs of one score alone have these kernels.
template <int, int>
using ProgramFoldTile = sm90::PlaneTile<>;
template <int, int>
using ProgramGradientTile = sm90::PlaneTile<>;

}  // namespace monoidreduce::planes
