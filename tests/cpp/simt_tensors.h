// Tensors for the SIMT tests: values on the host, in double but rounded to an element type, and copies on the device in any
// layout.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce::test {

using Shape = std::vector<std::int64_t>;

inline void encode(double value, DType dtype, char* to) {
  const auto put = [to](const auto& element) { std::memcpy(to, &element, sizeof(element)); };
  switch (dtype) {
    case DType::kFloat16:
      return put(__float2half_rn(static_cast<float>(value)));
    case DType::kBFloat16:
      return put(__float2bfloat16_rn(static_cast<float>(value)));
    case DType::kFloat32:
      return put(static_cast<float>(value));
    case DType::kFloat64:
      return put(value);
    case DType::kInt64:
      return put(static_cast<std::int64_t>(value));
    case DType::kBool:
      return put(value != 0);
  }
}

inline double decode(const char* from, DType dtype) {
  const auto get = [from](auto element) {
    std::memcpy(&element, from, sizeof(element));
    return element;
  };
  switch (dtype) {
    case DType::kFloat16:
      return __half2float(get(__half{}));
    case DType::kBFloat16:
      return __bfloat162float(get(__nv_bfloat16{}));
    case DType::kFloat32:
      return get(0.f);
    case DType::kFloat64:
      return get(0.);
    case DType::kInt64:
      return static_cast<double>(get(std::int64_t{}));
    case DType::kBool:
      return get(false);
  }
  return 0;
}

// The view of a dense tensor. Axes of size 1 are broadcast to the given shape.
inline TensorView strided_view(void* data, const Shape& own, const Shape& stride, const Shape& shape,
                               DType dtype, int device) {
  TensorView t{.data = data, .rank = static_cast<int>(shape.size()), .dtype = dtype, .cuda_device = device};
  for (int axis = 0; axis < t.rank; ++axis) {
    t.size[axis] = shape[axis];
    t.stride[axis] = own[axis] == 1 && shape[axis] != 1 ? 0 : stride[axis];
  }
  return t;
}

struct HostTensor {
  Shape shape;
  std::vector<double> values;  // row-major

  HostTensor() = default;
  explicit HostTensor(const Shape& shape, double value = 0) : shape(shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    values.assign(count, value);
  }

  bool present() const { return !shape.empty(); }
  TensorView view() { return view(shape); }
  TensorView view(const Shape& expanded) {
    if (!present()) return {};
    Shape stride(shape.size(), 1);
    for (int axis = static_cast<int>(shape.size()) - 2; axis >= 0; --axis)
      stride[axis] = stride[axis + 1] * shape[axis + 1];
    return strided_view(values.data(), shape, stride, expanded, DType::kFloat64, -1);
  }
};

// Normally distributed values that dtype represents exactly.
inline HostTensor random_tensor(std::mt19937& random, const Shape& shape, DType dtype, double deviation = 1) {
  HostTensor t(shape);
  std::normal_distribution<double> normal(0, deviation);
  for (double& value : t.values) {
    char element[8];
    encode(normal(random), dtype, element);
    value = decode(element, dtype);
  }
  return t;
}

enum class Layout {
  kDense,
  kGapped,    // every second element of every axis, from an odd address; NaN in between
  kReversed,  // the first axis is the contiguous one
};

class DeviceTensor {
 public:
  DeviceTensor() = default;
  DeviceTensor(const HostTensor& from, DType dtype, Layout layout = Layout::kDense)
      : shape_(from.shape), dtype_(dtype) {
    if (!from.present()) return;
    const int rank = static_cast<int>(shape_.size()), step = layout == Layout::kGapped ? 2 : 1;
    stride_.resize(rank);
    std::int64_t next = 1;
    for (int n = 0; n < rank; ++n) {
      const int axis = layout == Layout::kReversed ? n : rank - 1 - n;
      stride_[axis] = next * step;
      next *= step * shape_[axis];
    }
    offset_ = step - 1;
    elements_ = next + offset_;
    std::vector<char> bytes(elements_ * item_size(dtype));
    const bool floating = dtype != DType::kInt64 && dtype != DType::kBool;
    for (std::int64_t n = 0; n < elements_; ++n) {
      encode(floating ? std::numeric_limits<double>::quiet_NaN() : 1, dtype, &bytes[n * item_size(dtype)]);
    }
    for (std::size_t n = 0; n < from.values.size(); ++n)
      encode(from.values[n], dtype, &bytes[place(n) * item_size(dtype)]);
    check_cuda(cudaMalloc(&data_, bytes.size()), "cudaMalloc");
    check_cuda(cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceTensor(DeviceTensor&& other) noexcept { *this = std::move(other); }
  DeviceTensor& operator=(DeviceTensor&& other) noexcept {
    std::swap(shape_, other.shape_);
    std::swap(stride_, other.stride_);
    std::swap(dtype_, other.dtype_);
    std::swap(offset_, other.offset_);
    std::swap(elements_, other.elements_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceTensor() { cudaFree(data_); }

  TensorView view() const { return view(shape_); }
  TensorView view(const Shape& expanded) const {
    if (shape_.empty()) return {};
    char* const first =
        elements_ > offset_ ? static_cast<char*>(data_) + offset_ * item_size(dtype_) : nullptr;
    return strided_view(first, shape_, stride_, expanded, dtype_, 0);
  }

  // Waits for the device.
  std::vector<double> values() const {
    std::vector<char> bytes(elements_ * item_size(dtype_));
    check_cuda(cudaMemcpy(bytes.data(), data_, bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    std::int64_t count = 1;
    for (const std::int64_t size : shape_) count *= size;
    std::vector<double> values(count);
    for (std::int64_t n = 0; n < count; ++n) values[n] = decode(&bytes[place(n) * item_size(dtype_)], dtype_);
    return values;
  }
  DType dtype() const { return dtype_; }

 private:
  // The offset of element n, counted row-major.
  std::int64_t place(std::int64_t n) const {
    std::int64_t at = offset_;
    for (int axis = static_cast<int>(shape_.size()) - 1; axis >= 0; --axis) {
      at += n % shape_[axis] * stride_[axis];
      n /= shape_[axis];
    }
    return at;
  }

  Shape shape_, stride_;
  DType dtype_ = DType::kFloat32;
  std::int64_t offset_ = 0, elements_ = 0;
  void* data_ = nullptr;
};

}  // namespace monoidreduce::test
