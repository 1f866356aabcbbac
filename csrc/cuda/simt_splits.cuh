// How forward passes by SIMT kernels split their columns.
#pragma once

#include "monoidreduce/device/simt/splits.cuh"
#include "monoidreduce/plan.h"

namespace monoidreduce::cuda::simt {

// By the plan of the call, whose scratch holds the states of the splits.
inline monoidreduce::simt::Splits splits_of(const Plan& plan, const TensorView& scratch) {
  return plan.packing ? monoidreduce::simt::Splits{plan.packing->splits, scratch.data}
                      : monoidreduce::simt::Splits{};
}

}  // namespace monoidreduce::cuda::simt
