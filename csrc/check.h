// The checks of a call, made before any work. A call that passes them reads and writes only within its tensors. Messages use
// the names of the Python arguments.
#pragma once

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/operators.h"

namespace monoidreduce {

// Parts of error messages; they become text only if there is an error.
struct SizesText {
  const TensorView& tensor;
  friend void append(std::string& text, const SizesText& s) {
    text += '[';
    for (int d = 0; d < s.tensor.rank; ++d) text += message(d ? ", " : "", s.tensor.size[d]);
    text += ']';
  }
};
struct PlaceText {
  const TensorView& tensor;
  friend void append(std::string& text, const PlaceText& s) {
    text += s.tensor.is_cuda() ? message("cuda:", s.tensor.cuda_device) : "the CPU";
  }
};

struct ShapeText {
  const Shape& shape;
  const std::int64_t* sizes;
  friend void append(std::string& text, const ShapeText& s) {
    for (int d = 0; d < s.shape.rank; ++d) {
      const Axis& axis = s.shape.axes[d];
      text += message(d ? ", " : "[", axis.name);
      if (const std::int64_t size = axis.size_in(s.sizes); size != -1) text += message("=", size);
    }
    text += ']';
  }
};

// Checks the fields of one call, in their order.
class Checker {
 public:
  Checker(const TensorTraits& f, const TensorView& leading, bool only_cuda)
      : name_(f.name), leading_(leading), same_(leading.dtype), accumulation_(accumulation(same_)) {
    std::fill_n(sizes_, kMostAxes, -1);
    require(leading.present(), name_, ": expected a tensor, got none");
    require(f.type != Type::kSame || is_floating(same_), name_, ": expected a floating tensor, got ",
            name(same_));
    require(leading.is_cuda() || !only_cuda, name_,
            ": expected a tensor on a CUDA device, got one on the CPU");
  }

  template <class Call>
  void operator()(const Call& x, const TensorField<Call>& f) {
    const TensorView& t = x.*f.member;
    if (f.required || t.present()) check(f, t);
    if (f.rule) f.rule(x);
  }
  template <class Call, class T>
  void operator()(const Call& x, const OptionField<Call, T>& f) {
    require(!f.holds || f.holds(x.*f.member), f.name, ": expected ", f.expected, ", got ", x.*f.member);
    if (f.rule) f.rule(x);
  }
  template <class Call, class... Each>
  void operator()(const Call& x, const OptionField<Call, std::variant<Each...>>& f) {
    if (f.rule) f.rule(x);
  }
  // Options that are lists are validated by their kernels.
  template <class Call, class T>
  void operator()(const Call&, const OptionField<Call, std::vector<T>>&) {}
  template <class Call, class Enum>
  void operator()(const Call& x, const ChoiceField<Call, Enum>& f) {
    const int value = static_cast<int>(x.*f.member);
    require(value >= 0 && value < f.count, f.name, ": expected ", f.expected, ", got ", value);
  }
  template <class Call, class Options, class Field>
  void operator()(const Call& x, const NestedField<Call, Options, Field>& f) {
    (*this)(x.*f.within, static_cast<const Field&>(f));
  }

 private:
  void check(const TensorTraits& f, const TensorView& t) {
    require(t.present(), f.name, ": expected a tensor, got none");
    const DType expected = dtype(f, t);
    require(t.dtype == expected, f.name, ": expected ", name(expected), ", got ", name(t.dtype));
    require(t.cuda_device == leading_.cuda_device, f.name, ": expected a tensor on ", PlaceText{leading_},
            " as ", name_, ", got one on ", PlaceText{t});
    require(fits(f.shape, t), f.name, ": expected shape ", ShapeText{f.shape, sizes_}, ", got ",
            SizesText{t});
    for (int d = 0; d < t.rank; ++d) sizes_[f.shape.axes[d].place] = t.size[d];
    require(t.data != nullptr || t.numel() == 0, f.name, ": expected memory, got a null pointer");
    for (int d = 0; d < t.rank; ++d) {
      require(t.stride[d] >= 0, f.name, ": expected strides >= 0, got ", t.stride[d], " in axis ", d);
    }
    std::int64_t stride = 1;
    for (int d = t.rank - 1; f.contiguous && d >= 0 && t.numel() > 0; --d) {
      require(t.size[d] == 1 || t.stride[d] == stride, f.name, ": expected a contiguous tensor, got stride ",
              t.stride[d], " in axis ", d);
      stride *= t.size[d];
    }
  }

  DType dtype(const TensorTraits& f, const TensorView& t) const {
    const DType gradient = leading_.is_cuda() ? accumulation_ : same_;
    switch (f.type) {
      case Type::kSame:
        return same_;
      case Type::kAccumulation:
        return accumulation_;
      case Type::kSameOrAccumulation:
        return t.dtype == accumulation_ ? accumulation_ : same_;
      case Type::kGradient:
        return t.dtype == accumulation_ ? accumulation_ : gradient;
      case Type::kPlanGradient:
        return t.dtype == same_ ? same_ : accumulation_;
      case Type::kSameAccumulationOrBool:
        require(t.dtype == DType::kBool || t.dtype == same_ || t.dtype == accumulation_, f.name,
                ": expected bool, ", name(same_), " or ", name(accumulation_), ", got ", name(t.dtype));
        return t.dtype;
      case Type::kUpToFloat32:
        require(is_floating(t.dtype) && t.dtype != DType::kFloat64, f.name,
                ": expected float32 or a 16-bit type, got ", name(t.dtype));
        return t.dtype;
      case Type::kFloat32:
        return DType::kFloat32;
      case Type::kFloat16:
        return DType::kFloat16;
      case Type::kInt64:
        return DType::kInt64;
      case Type::kBool:
        return DType::kBool;
    }
    return same_;
  }

  bool fits(const Shape& shape, const TensorView& t) const {
    if (t.rank != shape.rank) return false;
    for (int d = 0; d < t.rank; ++d) {
      const std::int64_t expected = shape.axes[d].size_in(sizes_);
      if (expected != t.size[d] && expected != -1) return false;
    }
    return true;
  }

  const char* const name_;  // name of the leading tensor
  const TensorView& leading_;
  const DType same_, accumulation_;
  std::int64_t sizes_[kMostAxes];  // sizes of the call's axes, indexed by Axis::place; -1: not known yet
};

inline void check(const Launch& launch) {
  require(launch.threads >= 1, "threads: expected at least 1, got ", launch.threads);
}

template <class Call>
void check(const Call& x) {
  constexpr const auto& description = kDescription<Call>;
  Checker checker(std::get<0>(description.fields), leading(x), !description.has(kCpu | kAnyCpu));
  std::apply([&](const auto&... field) { (checker(x, field), ...); }, description.fields);
}

}  // namespace monoidreduce
