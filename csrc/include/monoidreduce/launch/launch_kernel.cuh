// Launches kernels on the device of the tensors and the caller's stream, and checks for errors.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "monoidreduce/error.h"
#include "monoidreduce/launch/device_facts.cuh"

namespace monoidreduce {

// Makes a device and its context current for the lifetime of the guard. The driver's functions need the context. A thread that
// has made no CUDA call yet, such as one of autograd's, has device 0 and no context.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline int multiprocessors(int device) { return device_facts(device).multiprocessors; }

// Kernels use grid-stride loops over their jobs, so there may be more jobs than the largest grid has blocks.
inline unsigned blocks_for(std::int64_t jobs) {
  constexpr std::int64_t kMostBlocks = 0x7fffffff;
  return static_cast<unsigned>(std::min(jobs, kMostBlocks));
}

// Bytes of shared memory that a kernel may use without cudaFuncAttributeMaxDynamicSharedMemorySize.
inline constexpr std::size_t kDefaultSharedBytes = 48 << 10;

[[noreturn]] inline void throw_launch_error(cudaError_t error, const char* name, unsigned blocks, int threads,
                                            std::size_t shared_bytes) {
  int device = -1, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const char* advice =
      error == cudaErrorNoKernelImageForDevice
          ? ". This build has no code for that architecture: install monoidreduce again with the environment "
            "variable MONOIDREDUCE_CUDA_ARCHS naming it"
          : "";
  throw Error(message("launch of ", name, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error),
                      "; grid ", blocks, ", block ", threads, ", shared memory ", shared_bytes,
                      " bytes, device ", device, " of architecture sm_", major, minor, advice));
}

// kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...) on the current device.
template <class... Parameters, class... Arguments>
void launch_kernel(const char* name, void (*kernel)(Parameters...), dim3 blocks, int threads,
                   std::size_t shared_bytes, void* stream, const Arguments&... arguments) {
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kDefaultSharedBytes) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  }
  if (error == cudaSuccess) {
    kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
    error = cudaPeekAtLastError();
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears it, so that the next launch does not report it again
    throw_launch_error(error, name, blocks.x * blocks.y, threads, shared_bytes);
  }
}

}  // namespace monoidreduce
