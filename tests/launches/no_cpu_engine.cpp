// The CPU engine, for a program that has no tensors on the CPU.
#include "cpu/engine.h"
#include "monoidreduce/error.h"

namespace monoidreduce {
namespace cpu {
const Engine& engine_for(DType) { throw Error("there is no CPU engine here"); }
void sequence_spans(const SequenceSpans&) { throw Error("there is no CPU engine here"); }
}  // namespace cpu
const char* cpu_isa(DType) { return "none"; }
}  // namespace monoidreduce
