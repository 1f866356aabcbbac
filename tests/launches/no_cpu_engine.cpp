// The CPU engine, for a program that has no tensors on the CPU.
#include "cpu/engine.h"
#include "monoidreduce/error.h"

namespace monoidreduce {
namespace cpu {
namespace {
[[noreturn]] void refuse() { throw Error("there is no CPU engine here"); }
}  // namespace
const Engine& engine_for(DType) { refuse(); }
void sequence_spans(const SequenceSpans&) { refuse(); }
void combine_logsumexp(const CombinedLogSumExp&) { refuse(); }
void combine_cross_entropy(const CombinedCrossEntropy&) { refuse(); }
void combine_log_probs(const CombinedLogProbs&) { refuse(); }
void combine_distillation(const CombinedDistillation&) { refuse(); }
}  // namespace cpu
const char* cpu_isa(DType) { return "none"; }
}  // namespace monoidreduce
