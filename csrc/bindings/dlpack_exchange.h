// The part of DLPack 1's exchange protocol that views a tensor without keeping it alive. An array type offers it as the
// attribute __dlpack_c_exchange_api__; torch does from 2.11 on. See https://dmlc.github.io/dlpack/latest.
#pragma once

#include <cstdint>

namespace monoidreduce::python::dlpack {

enum DeviceKind : std::int32_t { kCpu = 1, kCuda = 2 };
enum class ElementKind : std::uint8_t { kInt = 0, kFloat = 2, kBFloat = 4, kBool = 6 };

// DLTensor. The arrays of sizes and of strides (in elements) belong to the tensor that is viewed.
struct View {
  void* data;
  DeviceKind device;
  std::int32_t device_index;
  std::int32_t rank;
  ElementKind kind;
  std::uint8_t bits;
  std::uint16_t lanes;
  const std::int64_t *size, *stride;
  std::uint64_t byte_offset;
};

// DLPackExchangeAPI.
struct Exchange {
  static constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
  static constexpr const char* kCapsule = "dlpack_exchange_api";
  static constexpr std::uint32_t kMajor = 1;  // within a major version members are only added at the end

  std::uint32_t major, minor;
  const Exchange* previous;
  void *allocate, *from_object, *to_object;
  int (*view)(void* object, View* view);  // returns 0, or -1 with a Python exception set; may be null
};

}  // namespace monoidreduce::python::dlpack
