// The Python module monoidreduce._C: each operator as its description says, and what the build and the machine are. The
// package passes arguments by position: five names cost as much host time as six tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "calls.h"
#include "monoidreduce/instructions.h"
#include "monoidreduce/operators.h"
#include "monoidreduce/path_counter.h"
#include "tensor_caster.h"

namespace monoidreduce::python {
namespace {

std::vector<std::string> split(const char* list) {
  std::vector<std::string> items;
  std::istringstream text(list);
  for (std::string item; std::getline(text, item, ',');) items.push_back(item);
  return items;
}

py::object text_or_none(const char* text) { return *text ? py::object(py::str(text)) : py::none(); }

py::dict build_info() {
#ifdef MONOIDREDUCE_WITH_CUDA
  constexpr bool cuda = true;
#else
  constexpr bool cuda = false;
#endif
  return py::dict("version"_a = MONOIDREDUCE_BUILD_VERSION, "compiler"_a = MONOIDREDUCE_BUILD_COMPILER,
                  "cpu_isas"_a = split(MONOIDREDUCE_BUILD_CPU_ISAS), "cuda"_a = cuda,
                  "cuda_version"_a = text_or_none(MONOIDREDUCE_BUILD_CUDA_VERSION),
                  "cuda_architectures"_a = split(MONOIDREDUCE_BUILD_CUDA_ARCHS),
                  "cpu_only_reason"_a = text_or_none(MONOIDREDUCE_BUILD_CPU_ONLY_REASON));
}

// What Python writes programs for (monoidreduce/program/bytecode.py).
py::dict program_limits() {
  py::list instructions;
  for (const char* name : kInstructionNames) instructions.append(name);
  return py::dict("instructions"_a = py::tuple(instructions), "block_registers"_a = kBlockRegisters,
                  "row_registers"_a = kRowRegisters, "fields"_a = kStateFields);
}

// (rows, columns) that the CPU engine computes at a time, forward and backward.
py::tuple tiles_of(TensorArgument a, TensorArgument b, TensorArgument other_a, TensorArgument other_b,
                   TensorArgument payload, bool bias_gradient, int threads) {
  const Torch& torch = Torch::get();
  FoldProblem problem{};
  problem.a = torch.view("a", a.object), problem.b = torch.view("b", b.object);
  problem.other_a = torch.view("other_a", other_a.object),
  problem.other_b = torch.view("other_b", other_b.object);
  problem.payload = torch.view("payload", payload.object);
  const auto [forward, backward] = cpu_tiles(problem, bias_gradient, threads);
  return py::make_tuple(py::make_tuple(forward.rows, forward.columns),
                        py::make_tuple(backward.rows, backward.columns));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  Torch::load();
  Calls calls(m);
  calls.define(&attention_forward, &attention_forward_tier);
  calls.define(&attention_backward, &attention_backward_tier);
  calls.define(&cross_entropy_forward, &cross_entropy_forward_tier);
  calls.define(&cross_entropy_backward, &cross_entropy_backward_tier);
  calls.define(&cross_entropy_local_gradient);
  calls.define(&distillation_forward, &distillation_forward_tier);
  calls.define(&distillation_backward, &distillation_backward_tier);
  calls.define(&distillation_local_gradient);
  calls.define(&mlp_forward, &mlp_forward_tier);
  calls.define(&mlp_backward, &mlp_backward_tier);
  calls.define(&mlp_hidden);
  calls.define(&mlp_local_gradient);
  calls.define(&logsumexp_forward, &logsumexp_forward_tier);
  calls.define(&logsumexp_backward, &logsumexp_backward_tier);
  calls.define(&logsumexp_local_gradient);
  calls.define(&statistics_forward);
  calls.define(&statistics_backward);
  calls.define(&scale_rows);
  calls.define(&order_rows);
  calls.define(&rows_product);
  calls.define(&columns_product);
  m.def(
      "can_keep",
      [](int device, std::int64_t width, std::int64_t other_width, double scale, bool deterministic) {
        return can_keep(device, width, other_width, scale, {1, nullptr, deterministic});
      },
      "device"_a, "width"_a, "other_width"_a, "scale"_a, "deterministic"_a);
  m.def("build_info", &build_info);
  m.def("cpu_isa", py::overload_cast<>(&cpu_isa));
  m.def(
      "cpu_isa_of", [](TensorArgument t) { return cpu_isa(Torch::get().view("t", t.object).dtype); }, "t"_a);
  m.def("cpu_isas", &cpu_isas);
  m.def("cpu_tiles", &tiles_of, "a"_a, "b"_a, "other_a"_a, "other_b"_a, "payload"_a, "bias_gradient"_a,
        "threads"_a);
  m.attr("PROGRAM") = program_limits();
  m.def("path_counts", &path_counts);
}

}  // namespace monoidreduce::python
