// How forward passes by SIMT kernels split their columns.
#pragma once

#include "monoidreduce/device/simt/splits.cuh"
#include "monoidreduce/plan.h"

namespace monoidreduce::cuda::simt {

// The splits that the plan of a call asks for. Their states lie in the call's scratch.
inline monoidreduce::simt::Splits splits_of(const Plan& plan, const TensorView& scratch) {
  return plan.packing ? monoidreduce::simt::Splits{plan.packing->splits, scratch.data}
                      : monoidreduce::simt::Splits{};
}

}  // namespace monoidreduce::cuda::simt
