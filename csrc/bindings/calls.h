// The binding of a call, from its description: Python passes its fields by position, and then how to launch it.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "monoidreduce/describe.h"
#include "monoidreduce/operators.h"
#include "tensor_caster.h"

namespace monoidreduce::python {

using namespace pybind11::literals;

// What Python passes for a field.
template <class Call>
TensorArgument argument(const TensorField<Call>&);
template <class Call, class T>
T argument(const OptionField<Call, T>&);
template <class Call, class Enum>
int argument(const ChoiceField<Call, Enum>&);
template <class Call, class Options, class Field>
auto argument(const NestedField<Call, Options, Field>& f) -> decltype(argument(static_cast<const Field&>(f)));

template <class Call>
void set(Call& x, const TensorField<Call>& f, TensorArgument given) {
  x.*f.member = Torch::get().view(f.name, given.object);
}
template <class Call, class T>
void set(Call& x, const OptionField<Call, T>& f, T given) {
  x.*f.member = given;
}
template <class Call, class Enum>
void set(Call& x, const ChoiceField<Call, Enum>& f, int given) {
  x.*f.member = static_cast<Enum>(given);
}
template <class Call, class Options, class Field, class Given>
void set(Call& x, const NestedField<Call, Options, Field>& f, Given given) {
  set(x.*f.within, static_cast<const Field&>(f), given);
}

constexpr const char* name(Kind kind) {
  constexpr const char* kNames[] = {"tensor", "result", "gradient", "scratch"};
  return kNames[static_cast<int>(kind)];
}
constexpr const char* name(Type type) {
  constexpr const char* kNames[] = {"same",          "accumulation",  "same or accumulation",
                                    "gradient",      "tier gradient", "same, accumulation or bool",
                                    "up to float32", "float32",       "int64",
                                    "bool"};
  return kNames[static_cast<int>(type)];
}

// A field as plain data: its name, kind, type, whether it is optional, the names of its axes, its choices and its default.
// The type of a tensor is the rule of its dtype.
template <class Call>
py::tuple data_of(const TensorField<Call>& f) {
  py::list shape;
  for (int d = 0; d < f.shape.rank; ++d) shape.append(std::string(f.shape.axes[d].name));
  return py::make_tuple(f.name, name(f.kind), name(f.type), !f.required, py::tuple(shape), py::tuple(),
                        py::none());
}
template <class Call, class T>
py::tuple data_of(const OptionField<Call, T>& f) {
  const py::object initial = py::cast(Call{}.*f.member);
  return py::make_tuple(f.name, "option", py::type::of(initial).attr("__name__"), false, py::tuple(),
                        py::tuple(), initial);
}
template <class Call, class Enum>
py::tuple data_of(const ChoiceField<Call, Enum>& f) {
  py::list choices;
  for (int n = 0; n < f.count; ++n) choices.append(f.choices[n]);
  return py::make_tuple(f.name, "choice", "int", false, py::tuple(), py::tuple(choices),
                        static_cast<int>(Call{}.*f.member));
}

class Calls {
 public:
  explicit Calls(py::module_& m)
      : m_(m),
        field_(py::module_::import("collections")
                   .attr("namedtuple")("Field", "name kind type optional shape choices default",
                                       "module"_a = m.attr("__name__"))) {
    m.attr("Field") = field_;
    m.attr("CALLS") = calls_;
  }

  template <class Call>
  void define(void (*run)(const Call&, const Launch&)) {
    const auto& description = kDescription<Call>;
    const auto named = [](const auto& f) { return py::arg(f.name); };
    const auto released = [run](const Call& x, const Launch& launch) {
      const py::gil_scoped_release release;
      run(x, launch);
    };
    bind<Call>(description.name, description.fields, named, released, "threads"_a, "stream"_a);
    const auto data = [this](const auto& f) { return field_(*data_of(f)); };
    calls_[description.name] =
        std::apply([&](const auto&... f) { return py::make_tuple(data(f)...); }, description.fields);
  }
  template <class Call>
  void define(void (*run)(const Call&, const Launch&), Tier (*tier_of)(const Call&, const Launch&)) {
    define(run);
    define_tier(tier_of);
  }

 private:
  // The same arguments, with defaults: the results need not be there yet.
  template <class Call>
  void define_tier(Tier (*tier_of)(const Call&, const Launch&)) {
    const auto& description = kDescription<Call>;
    const auto with_default = [](const auto& f) { return py::arg(f.name) = data_of(f)[6]; };
    const auto as_tuple = [tier_of](const Call& x, const Launch& launch) {
      const Tier tier = tier_of(x, launch);
      return std::make_tuple(tier.name, tier.reason, tier.scratch, tier.adds_rows,
                             std::make_tuple(tier.part.rows, tier.part.columns));
    };
    bind<Call>((std::string(description.name) + "_tier").c_str(), description.fields, with_default, as_tuple,
               "threads"_a = 1, "stream"_a = 0);
  }

  template <class Call, class Named, class Function, class... Fields>
  void bind(const char* name, const std::tuple<Fields...>& fields, Named named, Function function,
            const auto& threads, const auto& stream) {
    const auto bound = [function](decltype(argument(std::declval<Fields>()))... given, int threads,
                                  std::uintptr_t stream, bool deterministic, bool tf32) {
      Call x;
      std::apply([&](const auto&... f) { (set(x, f, given), ...); }, kDescription<Call>.fields);
      return function(x, {threads, reinterpret_cast<void*>(stream), deterministic, tf32});
    };
    std::apply(
        [&](const auto&... f) {
          m_.def(name, bound, named(f)..., threads, stream, "deterministic"_a = false, "tf32"_a = false);
        },
        fields);
  }

  py::module_& m_;
  py::object field_;
  py::dict calls_;
};

}  // namespace monoidreduce::python
