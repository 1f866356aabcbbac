// A view of a tensor in somebody else's memory: pointer, sizes, strides (in elements), dtype and device. Plain data.
#pragma once

#include <cstdint>

namespace monoidreduce {

enum class DType : std::int8_t { kFloat16, kBFloat16, kFloat32, kFloat64, kInt64, kBool };

constexpr std::int64_t item_size(DType t) {
  switch (t) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kBool:
      return 1;
  }
  return 0;
}

constexpr const char* name(DType t) {
  switch (t) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kInt64:
      return "int64";
    case DType::kBool:
      return "bool";
  }
  return "?";
}

constexpr bool is_floating(DType t) { return t != DType::kInt64 && t != DType::kBool; }

// The dtype in which row statistics are stored and sums accumulated.
constexpr DType accumulation(DType t) { return t == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

struct TensorView {
  static constexpr int kMaxRank = 4;
  void* data = nullptr;
  int rank = 0;
  std::int64_t size[kMaxRank] = {};
  std::int64_t stride[kMaxRank] = {};
  DType dtype = DType::kFloat32;
  int cuda_device = -1;  // CUDA device index, -1 for the CPU

  bool present() const { return rank != 0; }
  bool is_cuda() const { return cuda_device >= 0; }
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int d = 0; d < rank; ++d) n *= size[d];
    return n;
  }
};

}  // namespace monoidreduce
