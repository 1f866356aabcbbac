// Loads and launches kernels that were compiled at run time (NVRTC).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

#include "monoidreduce/launch/driver.cuh"
#include "monoidreduce/launch/launch_kernel.cuh"

namespace monoidreduce {

// Loads the kernels with these names from an image, which is machine code. Returns the handle of the first; those of the others
// are the numbers after it. Kernels stay loaded, for all devices of the architecture. Thread-safe.
std::int64_t load_kernels(const std::string& image, const std::vector<std::string>& names);
CUkernel loaded_kernel(std::int64_t number);

// kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...) on the current device. The arguments have the types of the
// kernel's parameters.
template <class... Arguments>
void launch_loaded(const char* name, std::int64_t number, unsigned blocks, int threads,
                   std::size_t shared_bytes, void* stream, const Arguments&... arguments) {
  static const auto set_attribute = driver_function<decltype(cuKernelSetAttribute)>("cuKernelSetAttribute");
  static const auto launch = driver_function<decltype(cuLaunchKernel)>("cuLaunchKernel");
  const CUkernel kernel = loaded_kernel(number);
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  CUresult error = CUDA_SUCCESS;
  if (shared_bytes > kDefaultSharedBytes)
    error = set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(shared_bytes),
                          kernel, device);
  if (error == CUDA_SUCCESS) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    error = launch(reinterpret_cast<CUfunction>(kernel), blocks, 1, 1, static_cast<unsigned>(threads), 1, 1,
                   static_cast<unsigned>(shared_bytes), static_cast<CUstream>(stream), pointers, nullptr);
  }
  // Error codes of the runtime have the same numbers as the driver's.
  if (error != CUDA_SUCCESS)
    throw_launch_error(static_cast<cudaError_t>(error), name, blocks, threads, shared_bytes);
}

}  // namespace monoidreduce
