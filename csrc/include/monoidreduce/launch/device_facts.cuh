// The facts of the GPUs that are present. This header has no kernels, so any C++ compiler can read it.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "monoidreduce/error.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears it, so that the next launch does not report it again
  throw Error(message(call, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error)));
}

// Read once per process and device, because they do not change.
inline const DeviceFacts& device_facts(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceFacts> known;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(device); found != known.end()) return found->second;
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  };
  return known[device] = {.major = attribute(cudaDevAttrComputeCapabilityMajor),
                          .minor = attribute(cudaDevAttrComputeCapabilityMinor),
                          .multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
                          .cache_bytes = attribute(cudaDevAttrL2CacheSize),
                          .shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
}

}  // namespace monoidreduce
