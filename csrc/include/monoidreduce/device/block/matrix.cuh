// Tensors in device memory as kernels take them, of any element type and with any strides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// Reads and writes elements of a dtype. Loads return raw bits, so that all loads of a thread can be in flight
// before the first is widened. T is the type that the block computes in: float for float16, bfloat16 and
// float32 tensors, double for float64.
template <class T>
struct ElementAccess;

template <>
struct ElementAccess<float> {
  using Raw = std::uint32_t;
  __device__ static Raw load(const char* from, DType t) {
    return t == DType::kFloat32 ? *reinterpret_cast<const std::uint32_t*>(from)
                                : *reinterpret_cast<const std::uint16_t*>(from);
  }
  __device__ static float widen(Raw bits, DType t) {
    if (t == DType::kFloat32) return __uint_as_float(bits);
    if (t == DType::kBFloat16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<std::uint16_t>(bits)));
  }
  __device__ static void store(char* to, DType t, float value) {
    if (t == DType::kFloat32) {
      *reinterpret_cast<float*>(to) = value;
    } else {
      *reinterpret_cast<std::uint16_t*>(to) = t == DType::kBFloat16
                                                  ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                                                  : __half_as_ushort(__float2half_rn(value));
    }
  }
};

template <>
struct ElementAccess<double> {
  using Raw = double;
  __device__ static Raw load(const char* from, DType) { return *reinterpret_cast<const double*>(from); }
  __device__ static double widen(Raw bits, DType) { return bits; }
  __device__ static void store(char* to, DType, double value) { *reinterpret_cast<double*>(to) = value; }
};

// [batch, heads, rows, width], strides in bytes. It stays in the kernel's parameters, which are constant
// memory: blocks read a member where they need it, and it takes no registers in between.
struct Tensor {
  char* data = nullptr;  // null: absent
  std::int64_t size[4] = {}, stride[4] = {};
  DType dtype = DType::kFloat32;
};

// The [rows, width] matrix of one batch and head of a tensor; transposed, the [width, rows] matrix.
template <class T, bool kTransposed = false>
struct Matrix {
  using Access = ElementAccess<T>;
  const Tensor& tensor;
  char* data;

  __device__ Matrix(const Tensor& tensor, std::int64_t batch, std::int64_t head)
      : tensor(tensor), data(tensor.data + batch * tensor.stride[0] + head * tensor.stride[1]) {}

  __device__ std::int64_t rows() const { return tensor.size[kTransposed ? 3 : 2]; }
  __device__ std::int64_t width() const { return tensor.size[kTransposed ? 2 : 3]; }
  __device__ std::int64_t row_stride() const { return tensor.stride[kTransposed ? 3 : 2]; }
  __device__ std::int64_t stride() const { return tensor.stride[kTransposed ? 2 : 3]; }

  __device__ char* at(std::int64_t row, std::int64_t k) const {
    return data + row * row_stride() + k * stride();
  }
  __device__ T read(std::int64_t row, std::int64_t k) const {
    return Access::widen(Access::load(at(row, k), tensor.dtype), tensor.dtype);
  }
  __device__ void write(std::int64_t row, std::int64_t k, T value) const {
    Access::store(at(row, k), tensor.dtype, value);
  }
};

// The bias added to a score: 0 if there is none, or if it is bool and only masks.
template <class T>
__device__ __forceinline__ T score_bias(const Matrix<T>& bias, std::int64_t row, std::int64_t column) {
  return bias.tensor.data != nullptr && bias.tensor.dtype != DType::kBool ? bias.read(row, column) : T(0);
}

// False if a bool bias masks the element.
template <class T>
__device__ __forceinline__ bool leaves(const Matrix<T>& bias, std::int64_t row, std::int64_t column) {
  return bias.tensor.data == nullptr || bias.tensor.dtype != DType::kBool || *bias.at(row, column) != 0;
}

}  // namespace monoidreduce
