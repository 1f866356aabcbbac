// Stands in for the CPU engine, in a program that has no tensors on the CPU.
#include <tuple>

#include "cpu/engine.h"
#include "monoidreduce/error.h"
#include "monoidreduce/operators.h"

namespace monoidreduce {
namespace cpu {
namespace {
[[noreturn]] void refuse() { throw Error("there is no CPU engine here"); }
}  // namespace
const char* name(Isa) { return "none"; }
Isa isa_for(DType) { refuse(); }
template <class Call>
void baseline::run(const Call&, const Launch&) {
  refuse();
}
template <class Call>
void run_alike(const Call&) {
  refuse();
}
// Instantiates both for every call.
namespace {
template <class... Each>
constexpr auto functions(CallList<Each...>) {
  return std::tuple(&baseline::run<Each>..., &run_alike<Each>...);
}
[[gnu::used]] constexpr auto kFunctions = functions(Calls{});
}  // namespace
}  // namespace cpu
const char* cpu_isa(DType) { return "none"; }
}  // namespace monoidreduce
