// A call of an operator is a plain struct (ops/*.h). Beside it, describe() says which engines have kernels for it, and lists
// its tensors and options, once and in the order of the Python arguments. The checks (csrc/check.h), the choice of kernels
// (csrc/operators.cpp), the Python binding and its stub are derived from this description:
//
//   template <std::same_as<Call> X>
//   constexpr auto describe(const X*) {
//     return pass("name", kCpu | kSimt, tensor("x", &X::x, "N D"), result("out", &X::out, "N"),
//                 option("scale", &X::scale));
//   }
//
// describe() is a template, so that a source compiles only the descriptions that it uses: nvcc takes 8 seconds for all of
// them, and few kernels use one. The first tensor determines the device and the dtype of the call. A check that no field can
// express is a function, attached to a field by where().
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// Rules for the dtype of a tensor, given the dtype of the call.
enum class Type {
  kSame,
  kAccumulation,  // float64 if the call is float64, otherwise float32
  kSameOrAccumulation,
  kGradient,      // kSame or kAccumulation on the CPU, kAccumulation on CUDA (operators.h)
  kPlanGradient,  // kSame where the plan's kernels write the gradient, kAccumulation where they add to it
  kSameAccumulationOrBool,
  kUpToFloat32,  // float32 or a 16-bit type
  kFloat32,
  kFloat16,
  kInt64,
  kBool,
};
enum class Kind { kTensor, kResult, kGradient, kScratch };

// An axis of a tensor. Axes of the same name must have the same size throughout a call; the first tensor that has the axis
// sets it.
struct Axis {
  std::string_view name = {};
  std::int64_t size = -1;                           // a fixed size, or -1
  std::string_view of = {};                         // another axis, from whose size this one's is computed
  std::int64_t (*follows)(std::int64_t) = nullptr;  // computes it
  int place = -1, place_of = -1;                    // indices of `name` and `of` in the call's array of sizes

  // The axis' size, given the sizes that are known so far in a call. -1 if it is not known yet.
  constexpr std::int64_t size_in(const std::int64_t* sizes) const {
    if (follows != nullptr && sizes[place_of] != -1) return follows(sizes[place_of]);
    return size != -1 ? size : sizes[place];
  }
};
struct Shape {
  Axis axes[TensorView::kMaxRank];
  int rank = 0;

  // Parses "B H M F". In "statistics=6 N" the first axis has a fixed size, which must be one digit.
  constexpr Shape(const char* letters) {
    for (std::string_view rest = letters; !rest.empty();) {
      const std::string_view letter = rest.substr(0, rest.find(' '));
      const auto sign = letter.find('=');
      axes[rank].name = letter.substr(0, sign);
      if (sign != letter.npos) axes[rank].size = letter[sign + 1] - '0';
      ++rank, rest.remove_prefix(letter.size() == rest.size() ? rest.size() : letter.size() + 1);
    }
  }
  constexpr Shape(std::initializer_list<Axis> list) {
    for (const Axis& axis : list) axes[rank++] = axis;
  }
};

// An alias, because nvcc passes `T Call::*` to the host compiler in a form that the compiler warns about.
template <class Call, class T>
using Member = T Call::*;

// The part of a TensorField that does not depend on the type of the call.
struct TensorTraits {
  const char* name;
  Shape shape;
  Type type;
  Kind kind;
  bool required, contiguous;
};
template <class Call>
struct TensorField : TensorTraits {
  Member<Call, TensorView> member;
  void (*rule)(const Call&) = nullptr;

  constexpr TensorField maybe() const { return {{name, shape, type, kind, false, contiguous}, member, rule}; }
  constexpr TensorField dense() const { return {{name, shape, type, kind, required, true}, member, rule}; }
  constexpr TensorField strided() const { return {{name, shape, type, kind, required, false}, member, rule}; }
  constexpr TensorField where(void (*holds)(const Call&)) const { return {*this, member, holds}; }
};

// A tensor that is read; any strides.
template <class Call>
constexpr TensorField<Call> tensor(const char* name, TensorView Call::* member, Shape shape,
                                   Type type = Type::kSame) {
  return {{name, shape, type, Kind::kTensor, true, false}, member};
}
template <class Call>
constexpr TensorField<Call> optional(const char* name, TensorView Call::* member, Shape shape,
                                     Type type = Type::kSame) {
  return tensor(name, member, shape, type).maybe();
}
// A tensor that is written; the caller allocates it, contiguous.
template <class Call>
constexpr TensorField<Call> result(const char* name, TensorView Call::* member, Shape shape,
                                   Type type = Type::kSame) {
  return {{name, shape, type, Kind::kResult, true, true}, member};
}
template <class Call>
constexpr TensorField<Call> gradient(const char* name, TensorView Call::* member, Shape shape,
                                     Type type = Type::kGradient) {
  return {{name, shape, type, Kind::kGradient, false, true}, member};
}
template <class Call>
constexpr TensorField<Call> scratch(const char* name, TensorView Call::* member) {
  return {{name, "elements", Type::kAccumulation, Kind::kScratch, false, true}, member};
}

// An option of the call. holds(), if not null, must be true for its value; `expected` says the same in words, for the error
// message.
template <class Call, class T>
struct OptionField {
  const char* name;
  Member<Call, T> member;
  const char* expected = "";
  bool (*holds)(T) = nullptr;
  void (*rule)(const Call&) = nullptr;

  constexpr OptionField where(void (*holds_too)(const Call&)) const {
    return {name, member, expected, holds, holds_too};
  }
};
template <class Call, class T>
constexpr OptionField<Call, T> option(const char* name, T Call::* member) {
  return {name, member};
}
template <class Call, class T>
constexpr OptionField<Call, T> option(const char* name, T Call::* member, const char* expected,
                                      std::type_identity_t<bool (*)(T)> holds) {
  return {name, member, expected, holds};
}

// The option `workspace`: how many bytes of local gradients (dlogits) or hidden values a call may hold at a time.
template <class Call>
constexpr auto workspace(std::int64_t Call::* member) {
  return option("workspace", member, "bytes >= 0", [](std::int64_t bytes) { return bytes >= 0; });
}

// An option that is an enumeration with values from 0 on. Python knows the values by name.
template <class Call, class Enum>
struct ChoiceField {
  const char* name;
  Member<Call, Enum> member;
  const char* expected;
  const char* const* choices;
  int count;
};
template <class Call, class Enum, int kCount>
constexpr ChoiceField<Call, Enum> choice(const char* name, Enum Call::* member, const char* expected,
                                         const char* const (&choices)[kCount]) {
  return {name, member, expected, choices, kCount};
}

// A field of a struct that is a member of the call, such as the options that several calls share.
template <class Call, class Options, class Field>
struct NestedField : Field {
  Member<Call, Options> within;
};
template <class Call, class Options>
constexpr auto options(Options Call::* within) {
  const auto nested = [within]<class... Fields>(const Fields&... each) {
    return std::tuple(NestedField<Call, Options, Fields>{each, within}...);
  };
  return std::apply(nested, describe(static_cast<const Options*>(nullptr)));
}

template <class... Fields>
constexpr std::tuple<Fields...> fields(const Fields&... each) {
  return {each...};
}

inline constexpr int kMostAxes = 16;  // the largest number of differently named axes in a call

// Which engines have kernels for a call: a bit for each namespace that defines run() for it (cpu/engine.h, cuda/engine.h).
using KernelSet = unsigned;
inline constexpr KernelSet kCpu = 1;     // cpu::ISA, compiled for each instruction set
inline constexpr KernelSet kAnyCpu = 2;  // cpu, compiled once
inline constexpr KernelSet kGpus = 4;    // cuda, the same kernels for all GPUs
// cuda::simt, sm80, sm90, planes: by the plan's Family
inline constexpr KernelSet kSimt = 8, kSm80 = 16, kSm90 = 32, kPlanes = 64;

template <class Fields>
struct Description {
  const char* name;
  const char* pass;  // the pass that the call is, or belongs to; null: none
  bool counted;      // whether the call counts as a run of its pass (path_counter.h)
  KernelSet kernels;
  Fields fields;
  std::string_view axes[kMostAxes] = {};  // names

  constexpr bool has(KernelSet any_of) const { return (kernels & any_of) != 0; }
  constexpr bool is_planned() const { return pass != nullptr && has(kSimt | kSm80 | kSm90); }

  constexpr int place(std::string_view name) {
    int at = 0;
    while (!axes[at].empty() && axes[at] != name) ++at;
    axes[at] = name;
    return at;
  }
  template <class Field>
  constexpr void place_axes(Field& field) {
    if constexpr (std::is_base_of_v<TensorTraits, Field>) {
      for (Axis& axis : field.shape.axes) {
        if (!axis.name.empty()) axis.place = place(axis.name);
        if (!axis.of.empty()) axis.place_of = place(axis.of);
      }
    }
  }
};

// Each argument in `fields` is a field, or a tuple of fields that several calls share.
template <class... Fields>
constexpr auto described(const char* name, const char* pass, bool counted, KernelSet kernels,
                         const Fields&... fields) {
  const auto as_tuple = [](const auto& field) {
    if constexpr (requires { std::tuple_size<std::remove_cvref_t<decltype(field)>>::value; })
      return field;
    else
      return std::tuple(field);
  };
  auto all = std::tuple_cat(as_tuple(fields)...);
  Description<decltype(all)> description{name, pass, counted, kernels, all};
  std::apply([&](auto&... field) { (description.place_axes(field), ...); }, description.fields);
  return description;
}
// A forward or backward pass of an operator. A pass with SIMT kernels has a plan of its own (operators.h).
template <class... Fields>
constexpr auto pass(const char* name, KernelSet kernels, const Fields&... fields) {
  return described(name, name, true, kernels, fields...);
}
// An auxiliary call that belongs to no pass.
template <class... Fields>
constexpr auto helper(const char* name, KernelSet kernels, const Fields&... fields) {
  return described(name, nullptr, false, kernels, fields...);
}

template <class Call>
inline constexpr auto kDescription = describe(static_cast<const Call*>(nullptr));

// A part of a pass: some of its columns, or some rows and hidden units. If a Family has kernels for it, it runs by the plan of
// the pass.
template <class Pass, class... Fields>
constexpr auto part(const char* name, KernelSet kernels, const Fields&... fields) {
  return described(name, kDescription<Pass>.name, true, kernels, fields...);
}
// A call that follows a pass. The pass has been counted already.
template <class Pass, class... Fields>
constexpr auto after(const char* name, KernelSet kernels, const Fields&... fields) {
  return described(name, kDescription<Pass>.name, false, kernels, fields...);
}

// The tensor that determines the device and dtype of a call: the first one in its description.
template <class Call>
const TensorView& leading(const Call& x) {
  return x.*std::get<0>(kDescription<Call>.fields).member;
}

}  // namespace monoidreduce
