// The tiles of the resident forward passes in planes, of attention and of MLPs.
#pragma once

#include "../../plan/tiles.h"
#include "monoidreduce/device/resident/fold_forward_planes_sm90.cuh"

namespace monoidreduce::cuda::planes {

using Width64 = monoidreduce::sm90::PlanesTile<64, 3, 4>;
using Width128 = monoidreduce::sm90::PlanesTile<128, 2, 2>;
using Width256 = monoidreduce::sm90::PlanesTile<128, 2, 1, 2, 8>;  // 128 in each of two blocks

template <class Tile>
constexpr bool kPlanned = tiles::resident_planes(Tile::kWidth * Tile::kBlocks).rows == Tile::kRows &&
                          tiles::resident_planes(Tile::kWidth * Tile::kBlocks).columns == Tile::kColumns;
static_assert(kPlanned<Width64> && kPlanned<Width128> && kPlanned<Width256>);

}  // namespace monoidreduce::cuda::planes
