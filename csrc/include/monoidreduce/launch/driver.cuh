// The driver's functions, found at run time: the library does not link libcuda, so it loads where there is no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "monoidreduce/launch/device_facts.cuh"

namespace monoidreduce {

// As of CUDA 12.0. Looking takes microseconds: callers keep what is found.
template <class Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
  if (result != cudaDriverEntryPointSuccess) throw Error(message("the CUDA driver has no ", name));
  return reinterpret_cast<Function*>(found);
}

}  // namespace monoidreduce
