// The rows of distillation with the loss "jsd", from stored scores.
#include "monoidreduce/device/simt/jsd_rows_sm90.cuh"

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "../operator.h"
#include "monoidreduce/device/arch/approximate.cuh"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/math.h"
#include "monoidreduce/ops/stored_scores.h"
#include "monoidreduce/path_counter.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::simt;

// Errors of 2^-22 are as large as those of float32 scores around 1.
struct ApproximateMath {
  __device__ __forceinline__ static float exp2(float x) { return arch::exp2(x); }
  __device__ __forceinline__ static float log2(float x) { return arch::log2(x); }
  __device__ __forceinline__ static unsigned pack(float low, float high) {
    return arch::pack<__nv_bfloat16>(low, high);
  }
};

constexpr int kThreads = 512;
using Team = ClusterTeam<8, kThreads>;
constexpr int kSharedBytes = Team::kSharedBytes<JsdMasses<ApproximateMath>>;
static_assert(sizeof(JsdSums) == sizeof(JsdMasses<ApproximateMath>));
// From here on most threads of a cluster have columns.
constexpr std::int64_t kManyColumns = Team::kThreads * kJsdVector / 2;

template <class Call>
Jsd<ApproximateMath> jsd_of(const Call& x) {
  return {static_cast<float>(kLog2E * x.inverse), static_cast<float>(x.beta),
          static_cast<float>(std::log2(x.beta)), static_cast<float>(std::log1p(-x.beta) * kLog2E)};
}
template <class Call>
ScorePair scores_of(const Call& x) {
  return {data<float>(x.student), data<float>(x.teacher), x.student.size[0],
          x.student.size[1],      x.student.stride[0],    x.teacher.stride[0]};
}
template <class Call>
ActiveRows counted_of(const Call& x) {
  return {data<const bool>(x.mask), x.mask.stride[0]};
}

// blocks: how many take one row.
template <class Call, class... Parameters, class... Arguments>
void launch_rows(const Call& x, const Launch& launch, void (*kernel)(Parameters...), int blocks,
                 const Arguments&... arguments) {
  constexpr std::int64_t kMostRows = 1 << 20;  // at a time
  const std::int64_t rows = std::min(x.student.size[0], kMostRows);
  if (rows == 0) return;
  const DeviceGuard device(x.student.cuda_device);
  launch_kernel(kDescription<Call>.name, kernel, static_cast<unsigned>(rows * blocks), kThreads, kSharedBytes,
                launch.stream, jsd_of(x), scores_of(x), counted_of(x), arguments...);
}

}  // namespace

template <>
void run(const JsdRows& x, const Plan&, const Launch& launch) {
  const auto run = [&](auto kernel, int blocks) {
    launch_rows(x, launch, kernel, blocks, data<float>(x.loss), data<JsdRow>(x.stats),
                data<const float>(x.factor));
  };
  if (x.student.size[1] < kManyColumns)
    run(&jsd_rows_kernel<ApproximateMath, kThreads>, 1);
  else
    run(&jsd_rows_of_cluster<ApproximateMath, Team::kBlocks, kThreads>, Team::kBlocks);
  // Counted like passes, by the type of the operands.
  const char* const dtype = name(DType::kBFloat16);
  count_path("jsd_forward", "cuda", "sm90", false, dtype);
  if (x.factor.present()) count_path("jsd_backward", "cuda", "sm90", false, dtype);
}

template <>
void run(const JsdGradient& x, const Plan&, const Launch& launch) {
  launch_rows(x, launch, &jsd_gradient_kernel<ApproximateMath, kThreads>, 1, data<const JsdRow>(x.stats),
              data<const float>(x.factor));
}

}  // namespace monoidreduce::cuda::sm90
