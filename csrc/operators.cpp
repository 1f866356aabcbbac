#include "monoidreduce/operators.h"

#include "monoidreduce/checks.h"
#include "monoidreduce/error.h"

namespace monoidreduce {

#ifdef MONOIDREDUCE_WITH_CUDA
#define MR_RUN_ON_CUDA(name) cuda::name(arguments, launch)
#else
#define MR_RUN_ON_CUDA(name)                                                                              \
  throw Error(                                                                                            \
      message(#name, ": expected tensors on the CPU, got one on cuda:", leading(arguments).cuda_device,   \
              ". This build of monoidreduce is CPU-only; for GPUs, install it again where nvcc is, with " \
              "the environment variable MONOIDREDUCE_CUDA=ON"))
#endif

#define MR_DEFINE(name, Arguments)                              \
  void name(const Arguments& arguments, const Launch& launch) { \
    check(launch);                                              \
    check(arguments);                                           \
    if (!leading(arguments).is_cuda()) {                        \
      cpu::name(arguments, launch);                             \
    } else {                                                    \
      MR_RUN_ON_CUDA(name);                                     \
    }                                                           \
  }
MONOIDREDUCE_OPERATORS(MR_DEFINE)

#ifdef MONOIDREDUCE_WITH_CUDA
#define MR_TIER_ON_CUDA(name) cuda::name(arguments, launch)
#else
#define MR_TIER_ON_CUDA(name) Tier{"", "this build is CPU-only"}
#endif

#define MR_DEFINE_TIER(name, Arguments)                                                  \
  Tier name(const Arguments& arguments, [[maybe_unused]] const Launch& launch) {         \
    const TensorView& tensor = leading(arguments);                                       \
    if (!tensor.is_cuda()) return {cpu_isa(tensor.dtype), "the tensors are on the CPU"}; \
    return MR_TIER_ON_CUDA(name);                                                        \
  }
MR_DEFINE_TIER(attention_forward_tier, AttentionForward)
MR_DEFINE_TIER(attention_backward_tier, AttentionBackward)
MR_DEFINE_TIER(mlp_forward_tier, MlpForward)
MR_DEFINE_TIER(mlp_backward_tier, MlpBackward)
MR_DEFINE_TIER(cross_entropy_forward_tier, CrossEntropyForward)
MR_DEFINE_TIER(cross_entropy_backward_tier, CrossEntropyBackward)
MR_DEFINE_TIER(distillation_forward_tier, DistillationForward)
MR_DEFINE_TIER(distillation_backward_tier, DistillationBackward)
MR_DEFINE_TIER(logsumexp_forward_tier, LogSumExpForward)
MR_DEFINE_TIER(logsumexp_backward_tier, LogSumExpBackward)

bool can_keep([[maybe_unused]] int cuda_device, [[maybe_unused]] std::int64_t width,
              [[maybe_unused]] std::int64_t other_width, [[maybe_unused]] double scale,
              [[maybe_unused]] const Launch& launch) {
#ifdef MONOIDREDUCE_WITH_CUDA
  return cuda::can_keep(cuda_device, width, other_width, scale, launch);
#else
  return false;
#endif
}

#define MR_DEFINE_ON_CUDA(name, Arguments)                      \
  void name(const Arguments& arguments, const Launch& launch) { \
    check(launch);                                              \
    check(arguments);                                           \
    MR_RUN_ON_CUDA(name);                                       \
  }
MR_DEFINE_ON_CUDA(cross_entropy_local_gradient, CrossEntropyLocalGradient)
MR_DEFINE_ON_CUDA(distillation_local_gradient, DistillationLocalGradient)
MR_DEFINE_ON_CUDA(logsumexp_local_gradient, LogSumExpLocalGradient)
MR_DEFINE_ON_CUDA(scale_rows, RowScaling)
MR_DEFINE_ON_CUDA(order_rows, RowOrdering)
MR_DEFINE_ON_CUDA(rows_product, RowsProduct)
MR_DEFINE_ON_CUDA(columns_product, ColumnsProduct)
MR_DEFINE_ON_CUDA(mlp_hidden, MlpHidden)
MR_DEFINE_ON_CUDA(mlp_local_gradient, MlpLocalGradient)

}  // namespace monoidreduce
