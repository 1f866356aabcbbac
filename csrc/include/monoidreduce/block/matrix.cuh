// Matrices in device memory, of any element type and any strides: what a block reads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// How elements are read and written: as raw bits, so that all loads of a thread can be on their way before the first is widened.
// T is the type that the block computes in. A float computes for float16, bfloat16 and float32 tensors, a double for float64.
template <class T>
struct ElementAccess;

template <>
struct ElementAccess<float> {
  using Raw = std::uint32_t;
  __device__ static std::int64_t bytes(DType t) { return t == DType::kFloat32 ? 4 : 2; }
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
  __device__ static std::int64_t bytes(DType) { return 8; }
  __device__ static Raw load(const char* from, DType) { return *reinterpret_cast<const double*>(from); }
  __device__ static double widen(Raw bits, DType) { return bits; }
  __device__ static void store(char* to, DType, double value) { *reinterpret_cast<double*>(to) = value; }
};

// [rows, width]; strides in bytes.
template <class T>
struct Matrix {
  using Access = ElementAccess<T>;
  char* data;
  std::int64_t rows, width;
  std::int64_t row_stride, stride;
  DType dtype;

  __device__ char* at(std::int64_t row, std::int64_t k) const { return data + row * row_stride + k * stride; }
  __device__ T read(std::int64_t row, std::int64_t k) const {
    return Access::widen(Access::load(at(row, k), dtype), dtype);
  }
  __device__ void write(std::int64_t row, std::int64_t k, T value) const { Access::store(at(row, k), dtype, value); }
  __device__ Matrix transposed() const { return {data, width, rows, stride, row_stride, dtype}; }
};

// The matrix of one batch and head of a [batch, heads, rows, width] tensor. For a tensor that is absent: never to be read.
template <class T>
__device__ Matrix<T> matrix_of(const TensorView& t, std::int64_t batch, std::int64_t head) {
  const std::int64_t bytes = t.dtype == DType::kBool ? 1 : ElementAccess<T>::bytes(t.dtype);
  return {static_cast<char*>(t.data) + (batch * t.stride[0] + head * t.stride[1]) * bytes,
          t.size[2],
          t.size[3],
          t.stride[2] * bytes,
          t.stride[3] * bytes,
          t.dtype};
}

// A [width] vector as one row.
template <class T>
__device__ Matrix<T> vector_of(const TensorView& t) {
  return {static_cast<char*>(t.data), 1, t.size[0], 0, t.stride[0] * ElementAccess<T>::bytes(t.dtype), t.dtype};
}

}  // namespace monoidreduce
