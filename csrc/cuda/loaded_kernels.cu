// Kernels that NVRTC compiled for a user's program, loaded by the CUDA driver. A kernel is passed around as
// its number in the list here.
#include "monoidreduce/launch/loaded_kernels.cuh"

#include <cstddef>
#include <mutex>

namespace monoidreduce {
namespace {

struct Kernels {
  std::mutex mutex;
  std::vector<CUkernel> loaded;
};
Kernels& kernels() {
  static Kernels all;
  return all;
}

void check_driver(CUresult error, const char* call) { check_cuda(static_cast<cudaError_t>(error), call); }

}  // namespace

std::int64_t load_kernels(const std::string& image, const std::vector<std::string>& names) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const DeviceGuard guard(device);  // initialises the driver
  CUlibrary library;
  check_driver(driver_function<decltype(cuLibraryLoadData)>("cuLibraryLoadData")(
                   &library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
               "cuLibraryLoadData");
  std::vector<CUkernel> found(names.size());
  for (std::size_t n = 0; n < names.size(); ++n)
    check_driver(driver_function<decltype(cuLibraryGetKernel)>("cuLibraryGetKernel")(&found[n], library,
                                                                                     names[n].c_str()),
                 "cuLibraryGetKernel");
  const std::lock_guard lock(kernels().mutex);
  const std::int64_t first = static_cast<std::int64_t>(kernels().loaded.size());
  kernels().loaded.insert(kernels().loaded.end(), found.begin(), found.end());
  return first;
}

CUkernel loaded_kernel(std::int64_t number) {
  const std::lock_guard lock(kernels().mutex);
  const std::int64_t count = static_cast<std::int64_t>(kernels().loaded.size());
  require(0 <= number && number < count, "kernels: expected the number of one of ", count,
          " kernels that were loaded, got ", number);
  return kernels().loaded[static_cast<std::size_t>(number)];
}

}  // namespace monoidreduce
