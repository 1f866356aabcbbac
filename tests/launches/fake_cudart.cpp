#include "launches/fake_cudart.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "launches/parameters.h"

namespace monoidreduce::launches {
namespace {

// Addresses are numbers that are unlikely to occur otherwise: read as two ints, the high one is 27392 or more.
constexpr std::uint64_t kMemory = 0x6b00'0000'0000, kSlot = std::uint64_t{1} << 36;
// Bytes of shared memory that a kernel may use without cudaFuncAttributeMaxDynamicSharedMemorySize.
constexpr std::size_t kDefaultSharedBytes = 48 << 10;

struct Allocation {
  std::string name;
  std::size_t bytes;
};
struct Place {
  const Allocation& allocation;
  std::uint64_t offset;
  bool holds(std::uint64_t bytes) const { return offset + bytes <= allocation.bytes; }
};
struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  std::map<int, std::size_t> most_shared_bytes;  // by device
};
struct Configuration {
  dim3 grid, block;
  std::size_t shared_bytes;
  cudaStream_t stream;
};
struct Runtime {
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  std::vector<Allocation> memory;
  std::map<const void*, Kernel> kernels;
  std::vector<Configuration> configurations;
  std::vector<Event> events;
};
// Kernels are registered before main() begins.
Runtime& runtime() {
  static Runtime instance;
  return instance;
}

cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess) runtime().last_error = error;
  return error;
}

// The allocation that an address belongs to. An address beyond its end belongs to it too, and counts as outside.
std::optional<Place> find(std::uint64_t address) {
  const auto& memory = runtime().memory;
  const std::uint64_t slot = (address - kMemory) / kSlot;
  if (address < kMemory || slot >= memory.size()) return {};
  return Place{memory[slot], (address - kMemory) % kSlot};
}
bool holds(std::uint64_t address, std::uint64_t bytes) {
  const auto place = find(address);
  return place && place->holds(bytes);
}

std::string demangled(const char* name) {
  int status = 0;
  char* const text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

// Prints an address or a number. A number that may consist of several smaller ones is printed in hexadecimal.
void print(std::ostream& text, std::uint64_t word) {
  if (const auto place = find(word)) {
    text << place->allocation.name;
    if (place->offset) text << '+' << place->offset;
    if (!place->holds(0)) text << ":outside";
  } else if (word >> 32 == 0) {
    text << word;
  } else {
    text << "0x" << std::hex << std::setw(16) << std::setfill('0') << word << std::dec;
  }
}

std::string describe(const std::vector<std::uint64_t>& words) {
  std::ostringstream text;
  const char* separator = "";
  for (const std::uint64_t word : words) print(text << std::exchange(separator, " "), word);
  return text.str();
}

std::vector<std::uint64_t> words_of(const std::vector<std::byte>& bytes) {
  std::vector<std::uint64_t> words((bytes.size() + 7) / 8);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

bool outside(std::uint64_t word) {
  const auto place = find(word);
  return place && !place->holds(0);
}

// The error with which a device refuses a launch, or success.
cudaError_t refusal(const Kernel& kernel, const Event& event, bool strays) {
  const Device& device = kDevices[event.device];
  const auto [x, y, z] = event.grid;
  const unsigned threads = event.block[0] * event.block[1] * event.block[2];
  if (x == 0 || x > 0x7fffffff || y != 1 || z != 1 || threads == 0 || threads > 1024)
    return cudaErrorInvalidConfiguration;
  const auto most = kernel.most_shared_bytes.find(event.device);
  if (event.shared_bytes > (most == kernel.most_shared_bytes.end() ? kDefaultSharedBytes : most->second))
    return cudaErrorInvalidValue;
  if (event.name.find("sm90::") != std::string::npos && (device.major != 9 || device.minor != 0))
    return cudaErrorNoKernelImageForDevice;
  return strays ? cudaErrorIllegalAddress : cudaSuccess;
}

// The content of a fake tensor map: all arguments that it is made from.
struct Map {
  void* address;
  cuuint64_t sizes[4] = {}, strides[3] = {};
  cuuint32_t box[4] = {}, steps[4] = {}, type, swizzle, promotion, fill;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

std::uint64_t bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    default:
      throw std::logic_error("a tensor map of an element type that is not known here");
  }
}

CUresult encode_tiled(CUtensorMap* result, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (rank != 4 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
  Map map{.address = address,
          .type = cuuint32_t(type),
          .swizzle = cuuint32_t(swizzle),
          .promotion = cuuint32_t(promotion),
          .fill = cuuint32_t(fill)};
  const std::uint64_t line = box[0] * bytes_of(type), widest = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                                                               : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                                                                      : 256;
  bool valid = reinterpret_cast<std::uint64_t>(address) % 16 == 0 && line % 16 == 0 && line <= widest;
  std::uint64_t end = sizes[0] * bytes_of(type);
  for (int d = 0; d < 4; ++d) {
    map.sizes[d] = sizes[d], map.box[d] = box[d], map.steps[d] = steps[d];
    valid = valid && sizes[d] >= 1 && sizes[d] <= std::uint64_t{1} << 32 && box[d] >= 1 && box[d] <= 256;
    if (d == 0) continue;
    map.strides[d - 1] = strides[d - 1];
    valid = valid && strides[d - 1] % 16 == 0 && strides[d - 1] < std::uint64_t{1} << 40;
    end += (sizes[d] - 1) * strides[d - 1];
  }
  if (!valid || !holds(reinterpret_cast<std::uint64_t>(address), end)) return CUDA_ERROR_INVALID_VALUE;
  std::memset(result, 0, sizeof *result);
  std::memcpy(result, &map, sizeof map);
  return CUDA_SUCCESS;
}

}  // namespace

void describe_parameters(const void* kernel, std::vector<Parameter> parameters) {
  runtime().kernels.at(kernel).parameters = std::move(parameters);
}

std::vector<Event> take_events() { return std::exchange(runtime().events, {}); }

void* allocate(const std::string& name, std::size_t bytes) {
  auto& memory = runtime().memory;
  memory.push_back({name, bytes});
  return reinterpret_cast<void*>(kMemory + (memory.size() - 1) * kSlot);
}

void free_all() { runtime().memory.clear(); }

}  // namespace monoidreduce::launches

using namespace monoidreduce::launches;

// Functions that code generated by nvcc calls.
extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  runtime().kernels[function].name = demangled(name);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_bytes, CUstream_st* stream) {
  runtime().configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared_bytes, void* stream) {
  const Configuration last = runtime().configurations.back();
  runtime().configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared_bytes, cudaStream_t stream) {
  const Kernel& kernel = runtime().kernels.at(function);
  Event event{kernel.name,
              runtime().device,
              {grid.x, grid.y, grid.z},
              {block.x, block.y, block.z},
              shared_bytes,
              stream,
              {}};
  bool strays = false;
  for (const Parameter& parameter : kernel.parameters) {
    std::vector<std::byte> bytes(parameter.size);
    std::memcpy(bytes.data(), *arguments++, parameter.size);
    parameter.clear_padding(bytes.data());
    const std::vector<std::uint64_t> words = words_of(bytes);
    strays = strays || std::any_of(words.begin(), words.end(), outside);
    event.parameters.push_back(describe(words));
  }
  runtime().events.push_back(event);
  return noted(refusal(kernel, event, strays));
}

// Functions that the library calls.
cudaError_t cudaGetDevice(int* device) {
  *device = runtime().device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDeviceCount) return noted(cudaErrorInvalidDevice);
  runtime().device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  if (device < 0 || device >= kDeviceCount) return noted(cudaErrorInvalidDevice);
  const Device& facts = kDevices[device];
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      return *value = facts.major, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      return *value = facts.minor, cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      return *value = facts.multiprocessors, cudaSuccess;
    case cudaDevAttrL2CacheSize:
      return *value = facts.cache_bytes, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return *value = facts.shared_bytes, cudaSuccess;
    default:
      throw std::logic_error("an attribute of a device that is not known here");
  }
}
cudaError_t cudaGetLastError() { return std::exchange(runtime().last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return runtime().last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorNoKernelImageForDevice:
      return "cudaErrorNoKernelImageForDevice";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    default:
      return "cudaError";
  }
}
const char* cudaGetErrorString(cudaError_t) { return "said the fake runtime"; }
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
    throw std::logic_error("an attribute of a kernel that is not known here");
  const int device = runtime().device;
  if (value > kDevices[device].shared_bytes) return noted(cudaErrorInvalidValue);
  runtime().kernels.at(function).most_shared_bytes[device] = value;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  if (symbol != std::string("cuTensorMapEncodeTiled")) return noted(cudaErrorInvalidValue);
  *function = reinterpret_cast<void*>(&encode_tiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  const auto address = reinterpret_cast<std::uint64_t>(to);
  runtime().events.push_back({"cudaMemsetAsync",
                              runtime().device,
                              {},
                              {},
                              0,
                              stream,
                              {describe({address}), describe({std::uint64_t(value)}), describe({bytes})}});
  return noted(holds(address, bytes) ? cudaSuccess : cudaErrorInvalidValue);
}
}
