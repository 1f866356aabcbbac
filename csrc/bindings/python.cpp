// The Python module monoidreduce._C: a function for each call (from its description), plans, and facts about the build and the
// machine. The package passes arguments by position, because five keywords cost as much host time as six tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../plan/jobs.h"
#include "../plan/tiles.h"
#include "calls.h"
#include "monoidreduce/device/schedule/packing.h"
#include "monoidreduce/instructions.h"
#include "monoidreduce/launch/sections.h"
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

#ifdef MONOIDREDUCE_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

py::dict build_info() {
  return py::dict("version"_a = MONOIDREDUCE_BUILD_VERSION, "compiler"_a = MONOIDREDUCE_BUILD_COMPILER,
                  "cpu_isas"_a = split(MONOIDREDUCE_BUILD_CPU_ISAS), "cuda"_a = kWithCuda,
                  "cuda_version"_a = text_or_none(MONOIDREDUCE_BUILD_CUDA_VERSION),
                  "cuda_architectures"_a = split(MONOIDREDUCE_BUILD_CUDA_ARCHS),
                  "cpu_only_reason"_a = text_or_none(MONOIDREDUCE_BUILD_CPU_ONLY_REASON));
}

// The interpreter's instructions and limits, for the Python code that writes programs (monoidreduce/folds/cpu/bytecode.py).
py::dict program_limits() {
  py::list instructions;
  for (const char* name : kInstructionNames) instructions.append(name);
  return py::dict("instructions"_a = py::tuple(instructions), "block_registers"_a = kBlockRegisters,
                  "row_registers"_a = kRowRegisters, "fields"_a = kStateFields, "steps"_a = kMostSteps);
}

// ((rows, columns), (rows, columns)) that the CPU engine computes at a time, forward and backward.
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

// The table of kernel families, FAMILIES.
void define_families(py::module_& m) {
  py::class_<Capabilities>(m, "Capabilities")
      .def_readonly("name", &Capabilities::name)
      .def_readonly("tensor_cores", &Capabilities::tensor_cores)
      .def_readonly("clusters", &Capabilities::clusters)
      .def_readonly("planes", &Capabilities::planes)
      .def_readonly("score_mod_variants", &Capabilities::score_mod_variants)
      .def_readonly("architecture", &Capabilities::architecture);
  py::dict families;
  for (const Capabilities& family : kFamilies) families[family.name] = family;
  m.attr("FAMILIES") = families;
}

std::optional<std::pair<std::int64_t, std::int64_t>> rows_and_columns(const std::optional<TileSize>& size) {
  if (!size) return {};
  return std::pair(size->rows, size->columns);
}

// A plan, with everything that Python's ops need to allocate, copy and multiply. They ask for capabilities, never for the name
// of a family.
void define_plan(py::module_& m) {
  py::class_<DeviceFacts>(m, "DeviceFacts")
      .def(py::init([](int major, int minor, int multiprocessors, std::int64_t cache_bytes,
                       std::int64_t shared_bytes) {
             return DeviceFacts{major, minor, multiprocessors, cache_bytes, shared_bytes};
           }),
           "major"_a, "minor"_a, "multiprocessors"_a, "cache_bytes"_a, "shared_bytes"_a)
      .def_readonly("major", &DeviceFacts::major)
      .def_readonly("minor", &DeviceFacts::minor)
      .def_readonly("multiprocessors", &DeviceFacts::multiprocessors);
  const auto can = [](bool Capabilities::* what) {
    return [what](const Plan& plan) { return plan.can().*what; };
  };
  py::class_<OwnedRows>(m, "OwnedRows")
      .def_readonly("lanes", &OwnedRows::lanes)
      .def_readonly("splits", &OwnedRows::splits);
  py::class_<Plan>(m, "Plan")
      .def_readonly("scratch", &Plan::scratch)
      .def_property_readonly("saved_columns", [](const Plan& p) { return p.saved.columns; })
      .def_property_readonly("frames", [](const Plan& p) { return p.saved.frames; })
      .def_readonly("adds_rows", &Plan::adds_rows)
      .def_property_readonly("in_turn", [](const Plan& p) { return p.sharing.in_turn; })
      .def_property_readonly("split_jobs", [](const Plan& p) { return p.sharing.split_jobs; })
      .def_property_readonly(
          "job_parts", [](const Plan& p) { return std::pair(p.sharing.parts.heads, p.sharing.parts.rows); })
      .def_property_readonly("tile", [](const Plan& p) { return rows_and_columns(p.tile); })
      .def_property_readonly("streamed_tile",
                             [](const Plan& p) -> std::optional<std::pair<std::int64_t, std::int64_t>> {
                               if (!p.streamed_tile) return {};
                               return std::pair(p.streamed_tile->staying, p.streamed_tile->streamed);
                             })
      .def_property_readonly("packing",
                             [](const Plan& p) -> std::optional<std::tuple<int, int, int>> {
                               if (!p.packing) return {};
                               return std::tuple(p.packing->heads, p.packing->rows, p.packing->splits);
                             })
      .def_property_readonly("part", [](const Plan& p) { return rows_and_columns(p.part); })
      .def_property_readonly("tier", [](const Plan& p) { return p.can().name; })
      .def_property_readonly("can", &Plan::can)
      .def_property_readonly("tensor_cores", can(&Capabilities::tensor_cores))
      .def_property_readonly("computed",
                             [](const Plan& p) {
                               return py::make_tuple(p.computed.rows, p.computed.columns, p.computed.payload);
                             })
      .def_readonly("narrow", &Plan::narrow)
      .def_readonly("owned_rows", &Plan::owned_rows)
      .def_readonly("payload_slabs", &Plan::payload_slabs)
      .def_readonly("clusters", &Plan::clusters)
      .def_property_readonly("planes", can(&Capabilities::planes))
      .def_property_readonly("keeps", can(&Capabilities::keeps))
      .def_property_readonly("skips_rows", &Plan::skips_rows)
      .def_property_readonly("transposed", can(&Capabilities::transposed))
      .def_property_readonly("bias_in_tiles", can(&Capabilities::bias_in_tiles))
      .def("__str__", [](const Plan& p) { return text(p); });
}

// The jobs of kernels, and the constants of their schedules, for the cost model (monoidreduce/theory/costs/work.py).
void define_jobs(py::module_& m) {
  m.attr("CLUSTER_BLOCKS") = tiles::kSm90Loss.blocks;
  m.attr("PACKED_LINES") = kPackedLines;
  m.attr("SECTION_BYTES") = kSectionBytes;
  const auto streamed = [](std::int64_t rows, std::int64_t columns, std::int64_t left, std::int64_t right,
                           bool rows_stay, std::int64_t staying, std::int64_t streamed) {
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    for (const TileRange& tiles : streamed_tiles({rows, columns, left, right}, rows_stay, staying, streamed))
      ranges.emplace_back(tiles.begin, tiles.end);
    return ranges;
  };
  m.def("streamed_tiles", streamed, "rows"_a, "columns"_a, "left"_a, "right"_a, "rows_stay"_a, "staying"_a,
        "streamed"_a);
  const auto order = [](std::int64_t rows, std::int64_t columns, std::int64_t left, std::int64_t right,
                        bool rows_stay, std::int64_t tiles, std::int64_t heads, std::int64_t section) {
    return job_order({rows, columns, left, right}, rows_stay, tiles, heads, section);
  };
  m.def("job_order", order, "rows"_a, "columns"_a, "left"_a, "right"_a, "rows_stay"_a, "tiles"_a, "heads"_a,
        "section"_a);
  m.def("split_tiles", &split_tiles, "tiles"_a, "splits"_a);
  m.def("row_groups", &row_groups, "rows"_a, "columns"_a, "width"_a, "gpu"_a);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  Torch::load();
  define_families(m);
  define_plan(m);
  define_jobs(m);
  CallFunctions(m).define(Calls{});
  m.def(
      "can_keep",
      [](int device, std::int64_t width, std::int64_t other_width, double scale) {
        return kWithCuda && can_keep(width, other_width, scale, facts_of(device));
      },
      "device"_a, "width"_a, "other_width"_a, "scale"_a);
  m.def(
      "can_be_narrow",
      [](int device, std::int64_t width, double scale) {
        return kWithCuda && can_be_narrow(width, scale, facts_of(device));
      },
      "device"_a, "width"_a, "scale"_a);
  m.attr("NARROW_LINES") = py::make_tuple(kNarrowLines.few, kNarrowLines.many);
  m.def("facts_of", &facts_of, "device"_a);
  m.def(
      "load_kernels",
      [](const py::bytes& image, const std::vector<std::string>& names) {
        return load_kernels(image, names);
      },
      "image"_a, "names"_a);
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
