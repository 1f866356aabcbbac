// Combines what the ranks of a process group found for the same rows, by the monoids of ops/ranks.h.
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/ops/ranks.h"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 64;  // few: a row takes long, and blocks should be on all SMs

// One thread per row.
template <class Rows>
__global__ void __launch_bounds__(kThreads)
    combine_states_kernel(const __grid_constant__ Rows rows, std::int64_t count) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < count) combine_row(rows, row);
}

template <class Call>
void combine(const Call& x, const Launch& launch) {
  const std::int64_t count = x.states.size[2];
  if (count == 0) return;
  const DeviceGuard device(x.states.cuda_device);
  with_accumulation(x.states.dtype, [&](auto zero) {
    const auto rows = combined_rows<decltype(zero)>(x);
    launch_kernel("combine_states", &combine_states_kernel<std::remove_const_t<decltype(rows)>>,
                  blocks_for((count + kThreads - 1) / kThreads), kThreads, 0, launch.stream, rows, count);
  });
}

}  // namespace

template <>
void run(const CombinedLogSumExp& x, const Launch& launch) {
  combine(x, launch);
}
template <>
void run(const CombinedCrossEntropy& x, const Launch& launch) {
  combine(x, launch);
}
template <>
void run(const CombinedLogProbs& x, const Launch& launch) {
  combine(x, launch);
}
template <>
void run(const CombinedDistillation& x, const Launch& launch) {
  combine(x, launch);
}

}  // namespace monoidreduce::cuda
