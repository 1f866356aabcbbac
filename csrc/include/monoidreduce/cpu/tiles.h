// Conversion between tensors of any dtype and strides and the engine's panels of float (or double): loading, widening,
// transposing and storing rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#include "monoidreduce/cpu/pack.h"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

MR_HD float widen(float x) { return x; }
MR_HD double widen(double x) { return x; }
MR_HD float widen(BFloat16 x) {
  const std::uint32_t bits = std::uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
// Normal numbers: rebiases the exponent; infinity and NaN get the largest one. A subnormal half is an integer times 2^-24. (No
// subnormal float occurs on the way, because a processor may be set to read those as 0.)
MR_HD float widen(Float16 x) {
  const std::int32_t magnitude = x.bits & 0x7fff;
  const float whole = static_cast<float>(magnitude) * 0x1p-24f;
  std::uint32_t subnormal;
  std::memcpy(&subnormal, &whole, 4);
  const std::uint32_t normal =
      (std::uint32_t(magnitude) << 13) + (magnitude < 0x7c00 ? 0x38000000u : 0x70000000u);
  const std::uint32_t bits = (magnitude < 0x400 ? subnormal : normal) | std::uint32_t(x.bits & 0x8000) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

// Rounds to nearest even; NaN stays NaN.
template <class E>
MR_HD E narrow(double x) {
  return static_cast<E>(x);
}
template <class E>
MR_HD E narrow(float x) {
  return static_cast<E>(x);
}
template <>
MR_HD BFloat16 narrow<BFloat16>(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  return {static_cast<std::uint16_t>(x != x ? 0x7fc0u : rounded)};
}
template <>
MR_HD Float16 narrow<Float16>(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const std::uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  // If the half is subnormal: adding 0.5 leaves its bits, rounded, in the low bits of the sum.
  float tiny;
  std::memcpy(&tiny, &magnitude, 4);
  tiny += 0.5f;
  std::uint32_t tiny_bits;
  std::memcpy(&tiny_bits, &tiny, 4);
  const std::uint32_t subnormal = tiny_bits - 0x3f000000u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  const std::uint32_t half = magnitude > 0x7f800000u    ? 0x7e00u
                             : magnitude >= 0x477ff000u ? 0x7c00u
                             : magnitude < 0x38800000u  ? subnormal
                                                        : normal;
  return {static_cast<std::uint16_t>(sign | half)};
}
template <>
MR_HD BFloat16 narrow<BFloat16>(double x) {
  return narrow<BFloat16>(static_cast<float>(x));
}
template <>
MR_HD Float16 narrow<Float16>(double x) {
  return narrow<Float16>(static_cast<float>(x));
}

// Calls f with a null pointer to the (floating) element type, so that a loop in f is compiled for each type.
template <class F>
MR_HD void with_element_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(static_cast<Float16*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kFloat64:
      return f(static_cast<double*>(nullptr));
    default:
      __builtin_unreachable();
  }
}

// to[k * to_stride] = row[k], widened to T. offset and stride are in elements of the view.
template <class T>
inline void load_row(const TensorView& view, std::int64_t offset, std::int64_t stride, std::int64_t count,
                     T* to, std::int64_t to_stride) {
  with_element_type(view.dtype, [&](auto* type) {
    const auto* from = static_cast<decltype(type)>(view.data) + offset;
    if (stride == 1 && to_stride == 1) {
      for (std::int64_t k = 0; k < count; ++k) to[k] = static_cast<T>(widen(from[k]));
    } else {
      for (std::int64_t k = 0; k < count; ++k) to[k * to_stride] = static_cast<T>(widen(from[k * stride]));
    }
  });
}

// The element of a vector at `index`, widened to T.
template <class T>
inline T load_one(const TensorView& vector, std::int64_t index) {
  T value{};
  load_row(vector, index * vector.stride[0], 1, 1, &value, 1);
  return value;
}

template <class T>
inline void store_row(const TensorView& view, std::int64_t offset, std::int64_t stride, std::int64_t count,
                      const T* from, std::int64_t from_stride) {
  with_element_type(view.dtype, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    E* to = static_cast<E*>(view.data) + offset;
    if (stride == 1 && from_stride == 1) {
      for (std::int64_t k = 0; k < count; ++k) to[k] = narrow<E>(from[k]);
    } else {
      for (std::int64_t k = 0; k < count; ++k) to[k * stride] = narrow<E>(from[k * from_stride]);
    }
  });
}

inline std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t round_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }

// Uninitialised memory, aligned to a cache line. Null if there are no elements.
template <class T>
class Scratch {
 public:
  explicit Scratch(std::int64_t count)
      : data_(count == 0 ? nullptr
                         : static_cast<T*>(::operator new(sizeof(T) * static_cast<std::size_t>(count),
                                                          std::align_val_t(64)))) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { ::operator delete(data_, std::align_val_t(64)); }
  T* operator+(std::int64_t offset) const { return data_ + offset; }
  T* get() const { return data_; }

 private:
  T* data_;
};

// Numbers that are not finite, taken out of a tile. 0 times infinity or NaN is NaN, so in a matrix product such a number in a
// column would make even those rows NaN in which the column is masked. The contribution of these numbers is added separately,
// to the rows in which their column is not masked.
template <class T>
class NonFinite {
 public:
  struct Entry {
    std::int64_t row, column;
    T value;
  };
  NonFinite() = default;
  NonFinite(const NonFinite&) = delete;
  NonFinite& operator=(const NonFinite&) = delete;
  ~NonFinite() { ::operator delete(entries_); }

  // Lists the numbers that are not finite, and replaces them by 0. Rows have `width` elements and are `ld` apart.
  template <class E>
  void take(E* tile, std::int64_t rows, std::int64_t width, std::int64_t ld) {
    count_ = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      int found = 0;  // not a bool, so that the loop is vectorized
      for (std::int64_t k = 0; k < width; ++k) found |= finite(tile[r * ld + k]) ? 0 : 1;
      for (std::int64_t k = 0; found && k < width; ++k) {
        E& x = tile[r * ld + k];
        if (finite(x)) continue;
        push({r, k, static_cast<T>(widen(x))});
        x = E{};
      }
    }
  }
  const Entry* begin() const { return entries_; }
  const Entry* end() const { return entries_ + count_; }

 private:
  template <class E>
  static bool finite(E x) {
    return widen(x) - widen(x) == 0;
  }
  void push(Entry entry) {
    if (count_ == capacity_) {
      capacity_ = std::max<std::int64_t>(64, 2 * capacity_);
      auto* grown = static_cast<Entry*>(::operator new(sizeof(Entry) * static_cast<std::size_t>(capacity_)));
      if (count_) std::memcpy(grown, entries_, sizeof(Entry) * static_cast<std::size_t>(count_));
      ::operator delete(entries_);
      entries_ = grown;
    }
    entries_[count_++] = entry;
  }
  Entry* entries_ = nullptr;
  std::int64_t count_ = 0, capacity_ = 0;
};

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
