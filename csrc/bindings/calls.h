// Binds calls to Python, from their descriptions. Python passes the fields of a call by position, then how to launch it.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <variant>

#include "monoidreduce/describe.h"
#include "monoidreduce/operators.h"
#include "tensor_caster.h"

namespace monoidreduce::python {

using namespace pybind11::literals;

// The type of the argument that Python passes for a field.
template <class Call>
TensorArgument argument(const TensorField<Call>&);
template <class Call, class T>
T argument(const OptionField<Call, T>&);
template <class Call, class Enum>
int argument(const ChoiceField<Call, Enum>&);
template <class Call, class Options, class Field>
auto argument(const NestedField<Call, Options, Field>& f) -> decltype(argument(static_cast<const Field&>(f)));

// Sets a field of the call. kInMemory: whether tensors must have memory on the CPU or on a CUDA device. (For a plan they need
// not.)
template <bool kInMemory, class Call>
void set(Call& x, const TensorField<Call>& f, TensorArgument given) {
  x.*f.member = Torch::get().view(f.name, given.object, kInMemory);
}
template <bool, class Call, class T>
void set(Call& x, const OptionField<Call, T>& f, T given) {
  x.*f.member = given;
}
template <bool, class Call, class Enum>
void set(Call& x, const ChoiceField<Call, Enum>& f, int given) {
  x.*f.member = static_cast<Enum>(given);
}
template <bool kInMemory, class Call, class Options, class Field, class Given>
void set(Call& x, const NestedField<Call, Options, Field>& f, Given given) {
  set<kInMemory>(x.*f.within, static_cast<const Field&>(f), given);
}

constexpr const char* name(Kind kind) {
  constexpr const char* kNames[] = {"tensor", "result", "gradient", "scratch"};
  return kNames[static_cast<int>(kind)];
}
constexpr const char* name(Type type) {
  constexpr const char* kNames[] = {"same",          "accumulation",  "same or accumulation",
                                    "gradient",      "plan gradient", "same, accumulation or bool",
                                    "up to float32", "float32",       "float16",
                                    "int64",         "bool"};
  return kNames[static_cast<int>(type)];
}

// A field as plain data for Python: its name, kind, type, whether it is optional, the names of its axes, its choices and its
// default. The type of a tensor is the rule for its dtype (describe.h: Type).
template <class Call>
py::tuple data_of(const TensorField<Call>& f) {
  py::list shape;
  for (int d = 0; d < f.shape.rank; ++d) shape.append(std::string(f.shape.axes[d].name));
  return py::make_tuple(f.name, name(f.kind), name(f.type), !f.required, py::tuple(shape), py::tuple(),
                        py::none());
}
template <class T>
std::string type_name(const T& value) {
  return py::str(py::type::of(py::cast(value)).attr("__name__"));
}
template <class... Each>
std::string type_name(const std::variant<Each...>&) {
  std::string all;
  ((all += (all.empty() ? "" : " | ") + type_name(Each{})), ...);
  return all;
}
template <class Call, class T>
py::tuple data_of(const OptionField<Call, T>& f) {
  const T initial = Call{}.*f.member;
  return py::make_tuple(f.name, "option", type_name(initial), false, py::tuple(), py::tuple(), initial);
}
template <class Call, class Enum>
py::tuple data_of(const ChoiceField<Call, Enum>& f) {
  py::list choices;
  for (int n = 0; n < f.count; ++n) choices.append(f.choices[n]);
  return py::make_tuple(f.name, "choice", "int", false, py::tuple(), py::tuple(choices),
                        static_cast<int>(Call{}.*f.member));
}

// Defines a function of the module for each call, and the dictionary CALLS of their fields.
class CallFunctions {
 public:
  explicit CallFunctions(py::module_& m)
      : m_(m),
        field_(py::module_::import("collections")
                   .attr("namedtuple")("Field", "name kind type optional shape choices default",
                                       "module"_a = m.attr("__name__"))) {
    m.attr("Field") = field_;
    m.attr("CALLS") = calls_;
  }

  template <class... Each>
  void define(CallList<Each...>) {
    (define<Each>(), ...);
  }

 private:
  // Defines the function of a call, with an argument for the plan if it has one. A pass with SIMT kernels gets a second
  // function, which makes the plan from the same arguments.
  template <class Call>
  void define() {
    constexpr const auto& description = kDescription<Call>;
    if constexpr (description.is_planned()) {
      const auto call = [](const Call& x, int threads, std::uintptr_t stream, const Plan* plan) {
        const py::gil_scoped_release release;
        run(x, launch(threads, stream), plan);
      };
      bind<Call>(description.name, named, call, "threads"_a, "stream"_a, "plan"_a = py::none());
      if constexpr (description.has(kSimt)) define_plan<Call>();
    } else {
      const auto call = [](const Call& x, int threads, std::uintptr_t stream) {
        const py::gil_scoped_release release;
        run(x, launch(threads, stream));
      };
      bind<Call>(description.name, named, call, "threads"_a, "stream"_a);
    }
    list<Call>();
  }

  static Launch launch(int threads, std::uintptr_t stream) {
    return {.threads = threads, .stream = reinterpret_cast<void*>(stream)};
  }

  // Defines the function that makes a plan. Its arguments have defaults, because the results need not be allocated yet. gpu:
  // the facts of a GPU, which need not be present; tensors may then be on any device.
  template <class Call>
  void define_plan() {
    const auto make = [](const Call& x, bool deterministic, bool tf32, bool planes, const DeviceFacts* gpu) {
      const Launch mode{.deterministic = deterministic, .tf32 = tf32, .planes = planes};
      Plan made = plan(x, gpu ? *gpu : facts_of(leading(x).cuda_device), mode);
      if (gpu) made.sizes.device = -1;
      return made;
    };
    bind<Call, false>(("plan_" + std::string(kDescription<Call>.name)).c_str(), with_default, make,
                      "deterministic"_a = false, "tf32"_a = false, "planes"_a = false, "gpu"_a = py::none());
  }

  static constexpr auto named = [](const auto& f) { return py::arg(f.name); };
  static constexpr auto with_default = [](const auto& f) { return py::arg(f.name) = data_of(f)[6]; };

  template <class Call>
  void list() {
    const auto data = [this](const auto& f) { return field_(*data_of(f)); };
    calls_[kDescription<Call>.name] =
        std::apply([&](const auto&... f) { return py::make_tuple(data(f)...); }, kDescription<Call>.fields);
  }

  // Binds function(x, others...), where others are the arguments that Python passes after the fields.
  template <class Call, bool kInMemory = true, class Name, class Function, class... Others>
  void bind(const char* name, Name name_of, Function function, const Others&... others) {
    bind<Call, kInMemory>(name, name_of, function, &Function::operator(), kDescription<Call>.fields,
                          others...);
  }
  template <class Call, bool kInMemory, class Name, class Function, class Result, class... Rest,
            class... Fields, class... Others>
  void bind(const char* name, Name name_of, Function function,
            Result (Function::*)(const Call&, Rest...) const, const std::tuple<Fields...>& fields,
            const Others&... others) {
    const auto bound = [function](decltype(argument(std::declval<Fields>()))... given, Rest... rest) {
      Call x;
      std::apply([&](const auto&... f) { (set<kInMemory>(x, f, given), ...); }, kDescription<Call>.fields);
      return function(x, rest...);
    };
    std::apply([&](const auto&... f) { m_.def(name, bound, name_of(f)..., others...); }, fields);
  }

  py::module_& m_;
  py::object field_;
  py::dict calls_;
};

}  // namespace monoidreduce::python
