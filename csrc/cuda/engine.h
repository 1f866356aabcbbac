// The entry points of the CUDA engine, for each family of kernels: csrc/cuda/*.cu, sm80/*.cu and sm90/*.cu
// define run() for the calls that they have kernels for, as the calls' descriptions say (describe.h).
#pragma once

#include "monoidreduce/launch/launch.h"
#include "monoidreduce/plan.h"

namespace monoidreduce {

struct AttentionForward;
struct LogSumExpForward;
struct MlpForward;

}  // namespace monoidreduce

namespace monoidreduce::cuda {

// Kernels for every GPU.
template <class Call>
void run(const Call& x, const Launch& launch);

namespace simt {
template <class Call>
void run(const Call& x, const Plan& plan, const Launch& launch);
}
namespace sm80 {
template <class Call>
void run(const Call& x, const Plan& plan, const Launch& launch);
void mlp_few_rows(const MlpForward& x, const Packing& packing, const Launch& launch);
void logsumexp_mean(const LogSumExpForward& x, const Launch& launch);
}  // namespace sm80
namespace sm90 {
template <class Call>
void run(const Call& x, const Plan& plan, const Launch& launch);
void attention_few_rows(const AttentionForward& x, const Packing& packing, const Launch& launch);
void mlp_few_rows(const MlpForward& x, const Packing& packing, const Launch& launch);
void logsumexp_mean(const LogSumExpForward& x, const Launch& launch);
}  // namespace sm90
namespace planes {  // Hopper's kernels for float32 operands in planes
template <class Call>
void run(const Call& x, const Plan& plan, const Launch& launch);
}

}  // namespace monoidreduce::cuda
