#include "monoidreduce/operators.h"

#include "check.h"
#include "cpu/engine.h"
#include "cuda/engine.h"
#include "monoidreduce/error.h"
#include "monoidreduce/path_counter.h"

namespace monoidreduce {
namespace {

using cpu::Engine;

#ifdef MONOIDREDUCE_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;  // nothing in cuda/engine.h is there to be linked
#endif

template <auto kCuda, class Call>
void run_on_cuda(const Call& x, const Launch& launch) {
  check(launch);
  check(x);
  if constexpr (kWithCuda) {
    kCuda(x, launch);
  } else {
    throw Error(message(
        kDescription<Call>.name, ": expected tensors on the CPU, got one on cuda:", leading(x).cuda_device,
        ". This build of monoidreduce is CPU-only; for GPUs, install it again where nvcc is, with ",
        "the environment variable MONOIDREDUCE_CUDA=ON"));
  }
}

template <auto kCpu, auto kCuda, class Call>
void run(const Call& x, const Launch& launch) {
  const TensorView& tensor = leading(x);
  if (tensor.is_cuda()) return run_on_cuda<kCuda>(x, launch);
  check(launch);
  check(x);
  const Engine& engine = cpu::engine_for(tensor.dtype);
  count_path(kDescription<Call>.name, std::string("cpu/") + engine.isa + "/" + name(tensor.dtype));
  (engine.*kCpu)(x, launch);
}

template <auto kCuda, class Call>
Tier tier(const Call& x, [[maybe_unused]] const Launch& launch) {
  const TensorView& tensor = leading(x);
  if (!tensor.is_cuda()) return {cpu_isa(tensor.dtype), "the tensors are on the CPU"};
  if constexpr (kWithCuda) {
    return kCuda(x, launch);
  } else {
    return {"", "this build is CPU-only"};
  }
}

}  // namespace

void attention_forward(const AttentionForward& x, const Launch& launch) {
  run<&Engine::attention_forward, cuda::attention_forward>(x, launch);
}
void attention_backward(const AttentionBackward& x, const Launch& launch) {
  run<&Engine::attention_backward, cuda::attention_backward>(x, launch);
}
void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch) {
  run<&Engine::cross_entropy_forward, cuda::cross_entropy_forward>(x, launch);
  if (x.reduced.present())
    reduce_losses({x.loss, x.target, {}, x.reduced, x.options.ignore_index, x.mean}, launch);
}
void cross_entropy_backward(const CrossEntropyBackward& x, const Launch& launch) {
  run<&Engine::cross_entropy_backward, cuda::cross_entropy_backward>(x, launch);
}
void distillation_forward(const DistillationForward& x, const Launch& launch) {
  run<&Engine::distillation_forward, cuda::distillation_forward>(x, launch);
  if (x.reduced.present()) reduce_losses({x.loss, {}, x.mask, x.reduced, 0, x.mean}, launch);
}
void distillation_backward(const DistillationBackward& x, const Launch& launch) {
  run<&Engine::distillation_backward, cuda::distillation_backward>(x, launch);
}
void reduce_losses(const LossReduction& x, const Launch& launch) {
  run<&Engine::reduce_losses, cuda::reduce_losses>(x, launch);
}
void mlp_forward(const MlpForward& x, const Launch& launch) {
  run<&Engine::mlp_forward, cuda::mlp_forward>(x, launch);
}
void mlp_backward(const MlpBackward& x, const Launch& launch) {
  run<&Engine::mlp_backward, cuda::mlp_backward>(x, launch);
}
void logsumexp_forward(const LogSumExpForward& x, const Launch& launch) {
  run<&Engine::logsumexp_forward, cuda::logsumexp_forward>(x, launch);
}
void logsumexp_backward(const LogSumExpBackward& x, const Launch& launch) {
  run<&Engine::logsumexp_backward, cuda::logsumexp_backward>(x, launch);
}

void statistics_forward(const StatisticsForward& x, const Launch& launch) {
  run<&Engine::statistics_forward, cuda::statistics_forward>(x, launch);
}
void statistics_backward(const StatisticsBackward& x, const Launch& launch) {
  run<&Engine::statistics_backward, cuda::statistics_backward>(x, launch);
}

void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Launch& launch) {
  run_on_cuda<cuda::cross_entropy_local_gradient>(x, launch);
}
void distillation_local_gradient(const DistillationLocalGradient& x, const Launch& launch) {
  run_on_cuda<cuda::distillation_local_gradient>(x, launch);
}
void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Launch& launch) {
  run_on_cuda<cuda::logsumexp_local_gradient>(x, launch);
}
void scale_rows(const RowScaling& x, const Launch& launch) { run_on_cuda<cuda::scale_rows>(x, launch); }
void order_rows(const RowOrdering& x, const Launch& launch) { run_on_cuda<cuda::order_rows>(x, launch); }
void rows_product(const RowsProduct& x, const Launch& launch) { run_on_cuda<cuda::rows_product>(x, launch); }
void columns_product(const ColumnsProduct& x, const Launch& launch) {
  run_on_cuda<cuda::columns_product>(x, launch);
}
void mlp_hidden(const MlpHidden& x, const Launch& launch) { run_on_cuda<cuda::mlp_hidden>(x, launch); }
void mlp_local_gradient(const MlpLocalGradient& x, const Launch& launch) {
  run_on_cuda<cuda::mlp_local_gradient>(x, launch);
}

Tier attention_forward_tier(const AttentionForward& x, const Launch& launch) {
  return tier<cuda::attention_forward_tier>(x, launch);
}
Tier attention_backward_tier(const AttentionBackward& x, const Launch& launch) {
  return tier<cuda::attention_backward_tier>(x, launch);
}
Tier mlp_forward_tier(const MlpForward& x, const Launch& launch) {
  return tier<cuda::mlp_forward_tier>(x, launch);
}
Tier mlp_backward_tier(const MlpBackward& x, const Launch& launch) {
  return tier<cuda::mlp_backward_tier>(x, launch);
}
Tier cross_entropy_forward_tier(const CrossEntropyForward& x, const Launch& launch) {
  return tier<cuda::cross_entropy_forward_tier>(x, launch);
}
Tier cross_entropy_backward_tier(const CrossEntropyBackward& x, const Launch& launch) {
  return tier<cuda::cross_entropy_backward_tier>(x, launch);
}
Tier distillation_forward_tier(const DistillationForward& x, const Launch& launch) {
  return tier<cuda::distillation_forward_tier>(x, launch);
}
Tier distillation_backward_tier(const DistillationBackward& x, const Launch& launch) {
  return tier<cuda::distillation_backward_tier>(x, launch);
}
Tier logsumexp_forward_tier(const LogSumExpForward& x, const Launch& launch) {
  return tier<cuda::logsumexp_forward_tier>(x, launch);
}
Tier logsumexp_backward_tier(const LogSumExpBackward& x, const Launch& launch) {
  return tier<cuda::logsumexp_backward_tier>(x, launch);
}

bool can_keep([[maybe_unused]] int cuda_device, [[maybe_unused]] std::int64_t width,
              [[maybe_unused]] std::int64_t other_width, [[maybe_unused]] double scale,
              [[maybe_unused]] const Launch& launch) {
  if constexpr (kWithCuda) {
    return cuda::can_keep(cuda_device, width, other_width, scale, launch);
  } else {
    return false;
  }
}

}  // namespace monoidreduce
