// The element types of the tensor-core kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "monoidreduce/tensor_view.h"

namespace monoidreduce::cuda {

// Calls run(E{}) with the 16-bit type.
template <class Run>
void with_element(DType dtype, Run run) {
  if (dtype == DType::kBFloat16) return run(__nv_bfloat16{});
  run(__half{});
}

// The same for the operands of a contraction tile: float where the tile multiplies planes.
template <class Tile, class Run>
void with_element_of(DType dtype, Run run) {
  if constexpr (Tile::kPlanes == 2)
    run(float{});
  else
    with_element(dtype, run);
}

// The element types of a tier's kernels: with(dtype, run) calls run(E{}).
struct Halves {
  template <class Run>
  static void with(DType dtype, Run run) {
    with_element(dtype, run);
  }
};
struct Float {  // matrix products of floats are computed in tf32
  template <class Run>
  static void with(DType, Run run) {
    run(float{});
  }
};
struct HalvesAndFloat {  // matrix products of floats are computed in tf32
  template <class Run>
  static void with(DType dtype, Run run) {
    if (dtype == DType::kFloat32) return run(float{});
    with_element(dtype, run);
  }
};

}  // namespace monoidreduce::cuda
