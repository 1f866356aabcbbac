// What all CUDA operators use: the accumulation type, and the data of tensors.
#pragma once

#include "engine.h"
#include "monoidreduce/error.h"
#include "monoidreduce/rows.h"

namespace monoidreduce::cuda {

// Calls run(T{}) with the type in which tensors of the given element type are accumulated.
template <class Run>
void with_accumulation(DType dtype, Run run) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
      return run(float{});
    case DType::kFloat64:
      return run(double{});
    default:
      throw std::invalid_argument(message("expected a floating tensor, got ", name(dtype)));
  }
}

template <class T>
T* data(const TensorView& t) {
  return static_cast<T*>(t.data);
}

}  // namespace monoidreduce::cuda
