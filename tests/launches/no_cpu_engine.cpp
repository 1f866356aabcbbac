// The CPU engine's entry points, for a program that has no tensors on the CPU.
#include "monoidreduce/error.h"
#include "monoidreduce/operators.h"

namespace monoidreduce {
namespace cpu {
#define MR_REFUSE(name, Arguments) \
  void name(const Arguments&, const Launch&) { throw Error("there is no CPU engine here"); }
MONOIDREDUCE_OPERATORS(MR_REFUSE)
}  // namespace cpu
const char* cpu_isa(DType) { return "none"; }
}  // namespace monoidreduce
