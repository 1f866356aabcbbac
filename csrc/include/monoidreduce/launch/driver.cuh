// Functions of the CUDA driver, looked up at run time. The library does not link libcuda, so that it can be loaded on machines
// without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "monoidreduce/launch/device_facts.cuh"

namespace monoidreduce {

// The function as of CUDA 12.0. The look-up takes microseconds, so callers keep the result.
template <class Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
  if (result != cudaDriverEntryPointSuccess) throw Error(message("the CUDA driver has no ", name));
  return reinterpret_cast<Function*>(found);
}

}  // namespace monoidreduce
