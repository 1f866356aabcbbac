// Reduces losses to their mean or sum.
#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/ops/rows.h"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

// losses: [tokens]; reduced: one number. One block, so that the order of the sum is fixed. It is cheap: 4
// bytes are read for each token, whose logits took a fold.
template <class T>
__global__ void __launch_bounds__(kThreads)
    reduce_losses_kernel(const T* losses, std::int64_t tokens, const ActiveTokens counted, bool mean,
                         T* reduced) {
  double sum = 0;  // for float32 losses too: a long sum in float32 would lose digits
  double count = 0;
  for (std::int64_t i = threadIdx.x; i < tokens; i += kThreads) {
    if (counted(i)) sum += losses[i], count += 1;
  }

  __shared__ double sums[kWarps], counts[kWarps];
  const auto add = [](double a, double b) { return a + b; };
  sum = reduce_lanes<32>(sum, add);
  count = reduce_lanes<32>(count, add);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum, counts[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  static_assert(kWarps == 32);
  sum = reduce_lanes<32>(sums[threadIdx.x], add);
  count = reduce_lanes<32>(counts[threadIdx.x], add);
  if (threadIdx.x == 0) *reduced = static_cast<T>(mean ? sum / (count < 1 ? 1 : count) : sum);
}

}  // namespace

template <>
void run(const LossReduction& x, const Launch& launch) {
  with_accumulation(x.losses.dtype, [&](auto zero) {
    using T = decltype(zero);
    const DeviceGuard device(x.losses.cuda_device);
    launch_kernel("reduce_losses", &reduce_losses_kernel<T>, 1, kThreads, 0, launch.stream,
                  static_cast<const T*>(x.losses.data), x.losses.size[0], ActiveTokens(x), x.mean,
                  data<T>(x.reduced));
  });
}

}  // namespace monoidreduce::cuda
