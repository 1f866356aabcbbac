// The tile of the kernels that multiply planes (device/contraction/planes.cuh).
#pragma once

#include "../../plan/tiles.h"
#include "monoidreduce/launch/contraction_sm90.cuh"

namespace monoidreduce::cuda::planes {

// A stage has both planes of rows and columns, 64 KiB, and is multiplied three times. Wider tiles have no registers for two
// sums (Multiplier::add_products_of_planes).
template <bool kRowsTransposed = false>
using PlaneTile = monoidreduce::sm90::ContractionTile<128, 3, 1, kRowsTransposed, 2>;
static_assert(kSizesOf<PlaneTile<>> == tiles::kPlanesLoss);

}  // namespace monoidreduce::cuda::planes
