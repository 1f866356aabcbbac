// TMA maps of operands in planes (device/block/planes_sm90.cuh).
#pragma once

#include "monoidreduce/device/block/planes_sm90.cuh"
#include "monoidreduce/launch/tensor_map.cuh"

namespace monoidreduce::sm90 {

// split: [batch, heads, rows, 2 * width of a plane + 8] fp16.
inline PlaneMaps plane_maps(const TensorView& split) {
  return {tensor_map(split, kPlaneLines), encode_map(split, kPlaneLines, sizeof(RowScale))};
}

}  // namespace monoidreduce::sm90
