#include "monoidreduce/operators.h"

#include <type_traits>

#include "check.h"
#include "cpu/engine.h"
#include "cuda/engine.h"
#include "monoidreduce/error.h"
#include "monoidreduce/path_counter.h"
#include "plan/check.h"

#ifdef MONOIDREDUCE_WITH_CUDA
#include "monoidreduce/launch/device_facts.cuh"
#endif

namespace monoidreduce {
namespace {

using cpu::Engine;
namespace simt = cuda::simt;
namespace sm80 = cuda::sm80;
namespace sm90 = cuda::sm90;

#ifdef MONOIDREDUCE_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;  // nothing in cuda/engine.h is there to be linked
#endif
#ifdef MONOIDREDUCE_WITH_SM90
constexpr bool kWithSm90 = true;
#else
constexpr bool kWithSm90 = false;
#endif

template <class Call>
[[noreturn]] void refuse_cuda(const Call& x) {
  throw Error(message(
      kDescription<Call>.name, ": expected tensors on the CPU, got one on cuda:", leading(x).cuda_device,
      ". This build of monoidreduce is CPU-only; for GPUs, install it again where nvcc is, with ",
      "the environment variable MONOIDREDUCE_CUDA=ON"));
}

// A call that all GPUs take alike.
template <auto kCuda, class Call>
void run_on_cuda(const Call& x, const Launch& launch) {
  check(launch);
  check(x);
  if constexpr (kWithCuda)
    kCuda(x, launch);
  else
    refuse_cuda(x);
}

// Runs a call by the kernels of its plan's family. kNone where a family has none for it.
constexpr auto kNone = nullptr;
template <auto kSimt, auto kSm80, auto kSm90, class Call>
void run_planned(const Call& x, const Launch& given, const Plan& plan) {
  Launch launch = given;
  launch.deterministic = plan.deterministic, launch.tf32 = plan.tf32;
  const auto run = [&](auto kernels) {
    if constexpr (std::is_null_pointer_v<decltype(kernels)>)
      refuse(x, plan);
    else
      kernels(x, plan, launch);
  };
  if (plan.choice.family == Family::kSimt) return run(kSimt);
  if (plan.choice.family == Family::kSm80) return run(kSm80);
  if constexpr (kWithSm90) run(kSm90);
}

template <auto kCpu, auto kSimt, auto kSm80, auto kSm90, class Call>
void run(const Call& x, const Launch& launch, const Plan* given) {
  check(launch);
  check(x);
  const TensorView& tensor = leading(x);
  constexpr const char* kName = kDescription<Call>.name;
  if (!tensor.is_cuda()) {
    const Engine& engine = cpu::engine_for(tensor.dtype);
    count_path(kName, "cpu", engine.isa, false, name(tensor.dtype));
    return (engine.*kCpu)(x, launch);
  }
  if constexpr (kWithCuda) {
    const Plan plan = given ? *given : plan_without_workspace(x, facts_of(tensor.cuda_device), launch);
    check(x, plan);
    run_planned<kSimt, kSm80, kSm90>(x, launch, plan);
    count_path(kName, "cuda", plan.can().name, counts_order(x, plan), name(tensor.dtype));
  } else {
    refuse_cuda(x);
  }
}

// The same of a call whose CPU code is one for all instruction sets.
template <auto kCpu, auto kCuda, class Call>
void run_alike(const Call& x, const Launch& launch) {
  if (leading(x).is_cuda()) return run_on_cuda<kCuda>(x, launch);
  check(launch);
  check(x);
  kCpu(x);
}

// A part of a pass whose products torch takes on every device: counted as the pass.
template <auto kCpu, auto kCuda, class Call>
void run_between_products(const Call& x, const Launch& launch, const char* pass) {
  const TensorView& tensor = leading(x);
  if (tensor.is_cuda()) {
    run_on_cuda<kCuda>(x, launch);
    return count_path(pass, "cuda", "simt", false, name(tensor.dtype));
  }
  check(launch);
  check(x);
  const Engine& engine = cpu::engine_for(tensor.dtype);
  (engine.*kCpu)(x, launch);
  count_path(pass, "cpu", engine.isa, false, name(tensor.dtype));
}

// A call that has no kernels for GPUs yet.
template <auto kCpu, class Call>
void run_on_cpu(const Call& x, const Launch& launch) {
  check(launch);
  check(x);
  const TensorView& tensor = leading(x);
  require(!tensor.is_cuda(), kDescription<Call>.name,
          ": expected tensors on the CPU, got one on cuda:", tensor.cuda_device);
  const Engine& engine = cpu::engine_for(tensor.dtype);
  count_path(kDescription<Call>.name, "cpu", engine.isa, false, name(tensor.dtype));
  (engine.*kCpu)(x, launch);
}

// A forward pass that keeps local gradients does a part of the backward pass.
template <class Call>
void count_kept(const Call& x, const char* backward) {
  if (x.kept.present()) count_path(backward, "cuda", "sm90", false, name(x.x.dtype));
}

// A part of a pass, or what follows it, whose plan is that of the pass. counts: is it counted as the pass.
template <auto kSm80, auto kSm90, auto kSimt = kNone, class Call>
void run_part(const Call& x, const Launch& launch, const Plan* plan, const char* pass, bool counts = true) {
  check(launch);
  check(x);
  if constexpr (kWithCuda) {
    require(plan != nullptr, "plan: expected that of ", pass, ", got none");
    check_part(x, *plan, pass);
    run_planned<kSimt, kSm80, kSm90>(x, launch, *plan);
    if (counts) count_path(pass, "cuda", plan->can().name, false, name(leading(x).dtype));
  } else {
    refuse_cuda(x);
  }
}

template <auto kSm90, class Call>
void run_product(const Call& x, const FoldProblem& problem, const Launch& launch) {
  check(launch);
  check(x);
  if constexpr (kWithCuda) {
    const Choice choice = choose_contraction(problem, facts_of(x.a.cuda_device));
    require(choice.family == Family::kSm90,
            "a: expected a product on the tier sm90, got one on another: ", text({.choice = choice}));
    if constexpr (kWithSm90) kSm90(x, launch);
  } else {
    refuse_cuda(x);
  }
}

// A call that has kernels for Hopper alone.
template <auto kSm90, class Call>
void run_on_hopper(const Call& x, const Launch& launch) {
  check(launch);
  check(x);
  if constexpr (kWithCuda) {
    require(can_keep(8, 8, 1, facts_of(leading(x).cuda_device)), kDescription<Call>.name,
            ": expected tensors on a GPU of the tier sm90, got some on another");
    if constexpr (kWithSm90) kSm90(x, launch);
  } else {
    refuse_cuda(x);
  }
}

}  // namespace

const DeviceFacts& facts_of([[maybe_unused]] int cuda_device) {
#ifdef MONOIDREDUCE_WITH_CUDA
  require(cuda_device >= 0, "tensors: expected tensors on a GPU, or the facts of one");
  return device_facts(cuda_device);
#else
  throw Error("this build of monoidreduce is CPU-only: it plans for a GPU whose facts it is given");
#endif
}

void attention_forward(const AttentionForward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::attention_forward, simt::attention_forward, sm80::attention_forward, sm90::attention_forward>(
      x, launch, plan);
}
void attention_backward(const AttentionBackward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::attention_backward, simt::attention_backward, sm80::attention_backward,
      sm90::attention_backward>(x, launch, plan);
}
void cross_entropy_forward(const CrossEntropyForward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::cross_entropy_forward, simt::cross_entropy_forward, sm80::cross_entropy_forward,
      sm90::cross_entropy_forward>(x, launch, plan);
  count_kept(x, kDescription<CrossEntropyBackward>.name);
  if (x.reduced.present())
    reduce_losses({x.loss, x.target, {}, x.reduced, x.options.ignore_index, x.mean}, launch);
}
void cross_entropy_kept_gradients(const CrossEntropyKeptGradients& x, const Launch& launch,
                                  const Plan* plan) {
  run_part<kNone, sm90::cross_entropy_kept_gradients>(x, launch, plan, kDescription<CrossEntropyForward>.name,
                                                      false);
}
void cross_entropy_backward(const CrossEntropyBackward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::cross_entropy_backward, simt::cross_entropy_backward, kNone, kNone>(x, launch, plan);
}
void distillation_forward(const DistillationForward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::distillation_forward, simt::distillation_forward, sm80::distillation_forward,
      sm90::distillation_forward>(x, launch, plan);
  count_kept(x, kDescription<DistillationBackward>.name);
  if (x.reduced.present()) reduce_losses({x.loss, {}, x.mask, x.reduced, 0, x.mean}, launch);
}
void distillation_kept_gradients(const DistillationKeptGradients& x, const Launch& launch, const Plan* plan) {
  run_part<kNone, sm90::distillation_kept_gradients>(x, launch, plan, kDescription<DistillationForward>.name,
                                                     false);
}
void distillation_backward(const DistillationBackward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::distillation_backward, simt::distillation_backward, kNone, kNone>(x, launch, plan);
}
void mlp_forward(const MlpForward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::mlp_forward, simt::mlp_forward, sm80::mlp_forward, sm90::mlp_forward>(x, launch, plan);
}
void mlp_backward(const MlpBackward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::mlp_backward, simt::mlp_backward, sm80::mlp_backward, sm90::mlp_backward>(x, launch, plan);
}
void logsumexp_forward(const LogSumExpForward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::logsumexp_forward, simt::logsumexp_forward, sm80::logsumexp_forward, sm90::logsumexp_forward>(
      x, launch, plan);
}
void logsumexp_backward(const LogSumExpBackward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::logsumexp_backward, simt::logsumexp_backward, sm80::logsumexp_backward,
      sm90::logsumexp_backward>(x, launch, plan);
}
void log_probs_forward(const LogProbsForward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::log_probs_forward, simt::log_probs_forward, sm80::log_probs_forward, sm90::log_probs_forward>(
      x, launch, plan);
}
void log_probs_backward(const LogProbsBackward& x, const Launch& launch, const Plan* plan) {
  run<&Engine::log_probs_backward, simt::log_probs_backward, kNone, kNone>(x, launch, plan);
}

void modified_attention_forward(const ModifiedAttentionForward& x, const Launch& launch) {
  run_on_cpu<&Engine::modified_attention_forward>(x, launch);
}
void modified_attention_backward(const ModifiedAttentionBackward& x, const Launch& launch) {
  run_on_cpu<&Engine::modified_attention_backward>(x, launch);
}
void statistics_forward(const StatisticsForward& x, const Launch& launch) {
  run_on_cpu<&Engine::statistics_forward>(x, launch);
}
void statistics_backward(const StatisticsBackward& x, const Launch& launch) {
  run_on_cpu<&Engine::statistics_backward>(x, launch);
}

void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Launch& launch,
                                  const Plan* plan) {
  run_part<sm80::cross_entropy_local_gradient, sm90::cross_entropy_local_gradient>(
      x, launch, plan, kDescription<CrossEntropyBackward>.name);
}
void distillation_local_gradient(const DistillationLocalGradient& x, const Launch& launch, const Plan* plan) {
  run_part<sm80::distillation_local_gradient, sm90::distillation_local_gradient>(
      x, launch, plan, kDescription<DistillationBackward>.name);
}
void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Launch& launch, const Plan* plan) {
  run_part<sm80::logsumexp_local_gradient, sm90::logsumexp_local_gradient>(
      x, launch, plan, kDescription<LogSumExpBackward>.name);
}
void log_probs_local_gradient(const LogProbsLocalGradient& x, const Launch& launch, const Plan* plan) {
  run_part<sm80::log_probs_local_gradient, sm90::log_probs_local_gradient>(
      x, launch, plan, kDescription<LogProbsBackward>.name);
}
void modified_attention_fold(const ModifiedAttentionFold& x, const Launch& launch, const Plan* plan) {
  run_part<sm80::modified_attention_fold, sm90::modified_attention_fold, simt::modified_attention_fold>(
      x, launch, plan, kDescription<ModifiedAttentionFold>.name);
}
void modified_attention_pull(const ModifiedAttentionPull& x, const Launch& launch, const Plan* plan) {
  run_part<sm80::modified_attention_pull, sm90::modified_attention_pull, simt::modified_attention_pull>(
      x, launch, plan, kDescription<ModifiedAttentionPull>.name);
}
void statistics_fold(const StatisticsFold& x, const Launch& launch, const Plan* plan) {
  run_part<sm80::statistics_fold, sm90::statistics_fold, simt::statistics_fold>(
      x, launch, plan, kDescription<StatisticsFold>.name);
}
void statistics_local_gradient(const StatisticsLocalGradient& x, const Launch& launch, const Plan* plan) {
  run_part<sm80::statistics_local_gradient, sm90::statistics_local_gradient, simt::statistics_local_gradient>(
      x, launch, plan, kDescription<StatisticsLocalGradient>.name);
}
void statistics_row_gradient(const StatisticsRowGradient& x, const Launch& launch, const Plan* plan) {
  run_part<kNone, kNone, simt::statistics_row_gradient>(x, launch, plan,
                                                        kDescription<StatisticsRowGradient>.name);
}
#ifndef MONOIDREDUCE_WITH_CUDA
std::int64_t load_kernels(const std::string&, const std::vector<std::string>&) {
  throw Error("this build of monoidreduce is CPU-only: it loads no kernels");
}
#endif
void mlp_hidden(const MlpHidden& x, const Launch& launch, const Plan* plan) {
  run_part<sm80::mlp_hidden, sm90::mlp_hidden>(x, launch, plan, kDescription<MlpForward>.name);
}
void mlp_local_gradient(const MlpLocalGradient& x, const Launch& launch, const Plan* plan) {
  run_part<sm80::mlp_local_gradient, sm90::mlp_local_gradient>(x, launch, plan,
                                                               kDescription<MlpBackward>.name);
}

void gated_hidden(const GatedHidden& x, const Launch& launch) {
  run_between_products<&Engine::gated_hidden, cuda::gated_hidden>(x, launch, kDescription<MlpForward>.name);
}
void gated_gradient(const GatedGradient& x, const Launch& launch) {
  run_between_products<&Engine::gated_gradient, cuda::gated_gradient>(x, launch,
                                                                      kDescription<MlpBackward>.name);
}

void reduce_losses(const LossReduction& x, const Launch& launch) {
  if (x.losses.is_cuda()) return run_on_cuda<cuda::reduce_losses>(x, launch);
  check(launch);
  check(x);
  cpu::engine_for(x.losses.dtype).reduce_losses(x, launch);
}
void scale_rows(const RowScaling& x, const Launch& launch) { run_on_cuda<cuda::scale_rows>(x, launch); }
void copy_fitted(const FittedCopy& x, const Launch& launch) { run_on_cuda<cuda::copy_fitted>(x, launch); }
void order_rows(const RowOrdering& x, const Launch& launch) { run_on_cuda<cuda::order_rows>(x, launch); }
void sequence_spans(const SequenceSpans& x, const Launch& launch) {
  run_alike<cpu::sequence_spans, cuda::sequence_spans>(x, launch);
}
void combine_logsumexp(const CombinedLogSumExp& x, const Launch& launch) {
  run_alike<cpu::combine_logsumexp, cuda::combine_logsumexp>(x, launch);
}
void combine_cross_entropy(const CombinedCrossEntropy& x, const Launch& launch) {
  run_alike<cpu::combine_cross_entropy, cuda::combine_cross_entropy>(x, launch);
  if (x.reduced.present()) reduce_losses({x.loss, x.target, {}, x.reduced, x.ignore_index, x.mean}, launch);
}
void combine_log_probs(const CombinedLogProbs& x, const Launch& launch) {
  run_alike<cpu::combine_log_probs, cuda::combine_log_probs>(x, launch);
}
void combine_distillation(const CombinedDistillation& x, const Launch& launch) {
  run_alike<cpu::combine_distillation, cuda::combine_distillation>(x, launch);
  if (x.reduced.present()) reduce_losses({x.loss, {}, x.mask, x.reduced, 0, x.mean}, launch);
}
// Counted as passes, by the type of the operands.
void jsd_rows(const JsdRows& x, const Launch& launch) {
  run_on_hopper<sm90::jsd_rows>(x, launch);
  const char* const dtype = name(DType::kBFloat16);
  count_path("jsd_forward", "cuda", "sm90", false, dtype);
  if (x.factor.present()) count_path("jsd_backward", "cuda", "sm90", false, dtype);
}
void jsd_gradient(const JsdGradient& x, const Launch& launch) {
  run_on_hopper<sm90::jsd_gradient>(x, launch);
}
void undefine(const Undefined& x, const Launch& launch) { run_on_cuda<cuda::undefine>(x, launch); }
void rows_product(const RowsProduct& x, const Launch& launch) {
  run_product<sm90::rows_product>(x, rows_product_problem(x), launch);
}
void columns_product(const ColumnsProduct& x, const Launch& launch) {
  run_product<sm90::columns_product>(x, columns_product_problem(x), launch);
}
void score_product(const ScoreProduct& x, const Launch& launch) {
  run_product<sm90::score_product>(x, score_product_problem(x), launch);
}

}  // namespace monoidreduce
