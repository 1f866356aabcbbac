// Runs a call: checks it, then calls the kernels for its tensors' device. The description says which there are (KernelSet in
// describe.h).
#include "monoidreduce/operators.h"

#include <tuple>

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

#ifdef MONOIDREDUCE_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;  // nothing that cuda/engine.h declares is linked
#endif
#ifdef MONOIDREDUCE_WITH_SM90
constexpr bool kWithSm90 = true;
#else
constexpr bool kWithSm90 = false;
#endif

template <class Call>
void run_on_cpu(const Call& x, const Launch& launch) {
  constexpr const auto& description = kDescription<Call>;
  if constexpr (description.has(kAnyCpu)) cpu::run_alike(x);
  if constexpr (description.has(kCpu)) {
    const DType dtype = leading(x).dtype;
    const cpu::Isa isa = cpu::isa_for(dtype);
    if constexpr (description.counted) count_path(description.pass, "cpu", name(isa), false, name(dtype));
    cpu::run_by(isa, x, launch);
  }
}

// The plan that a call runs by, after a check that it fits the call.
template <class Call>
Plan checked_plan(const Call& x, const Launch& launch, const Plan* given) {
  constexpr const auto& description = kDescription<Call>;
  if constexpr (!description.is_planned()) {  // Hopper's matrix products, and the calls between them (jsd)
    const DeviceFacts& gpu = facts_of(leading(x).cuda_device);
    Plan plan{.call = description.name, .choice = {.family = Family::kSm90}};
    if constexpr (requires { product_problem(x); }) {
      plan.choice = choose_contraction(product_problem(x), gpu);
      require(plan.choice.family == Family::kSm90,
              "a: expected a product on the tier sm90, got one on another: ", text(plan));
    } else {
      require(can_keep(8, 8, 1, gpu), description.name,
              ": expected tensors on a GPU of the tier sm90, got some on another");
    }
    return plan;
  } else if constexpr (description.has(kCpu)) {
    if constexpr (requires { x.program; })  // the plan by which the program's kernel was compiled
      require(given != nullptr, "plan: expected that of ", description.pass, ", got none");
    const Plan plan = given ? *given : plan_without_workspace(x, facts_of(leading(x).cuda_device), launch);
    check(x, plan);
    return plan;
  } else {
    require(given != nullptr, "plan: expected that of ", description.pass, ", got none");
    check_part(x, *given, description.pass);
    return *given;
  }
}

// Runs the kernels of the plan's family.
template <class Call>
void run_planned(const Call& x, const Launch& given, const Plan& plan) {
  constexpr const auto& description = kDescription<Call>;
  Launch launch = given;
  launch.deterministic = plan.deterministic, launch.tf32 = plan.tf32;
  const Family family = plan.choice.family;
  if constexpr (description.has(kSimt))
    if (family == Family::kSimt) return cuda::simt::run(x, plan, launch);
  if constexpr (description.has(kSm80))
    if (family == Family::kSm80) return cuda::sm80::run(x, plan, launch);
  if constexpr (description.has(kSm90) && kWithSm90)
    if (family == Family::kSm90) return cuda::sm90::run(x, plan, launch);
  if constexpr (description.has(kPlanes) && kWithSm90)
    if (family == Family::kPlanes) return cuda::planes::run(x, plan, launch);
  refuse(x, plan);
}

template <class Call>
void run_on_cuda(const Call& x, const Launch& launch, const Plan* given) {
  constexpr const auto& description = kDescription<Call>;
  const char* family = "simt";
  bool deterministic = false;
  if constexpr (description.has(kGpus)) {
    cuda::run(x, launch);
  } else {
    const Plan plan = checked_plan(x, launch, given);
    run_planned(x, launch, plan);
    family = plan.can().name, deterministic = description.has(kCpu) && counts_order(x, plan);
  }
  if constexpr (description.counted)
    count_path(description.pass, "cuda", family, deterministic, name(leading(x).dtype));
}

// Computes the sum or the mean of the losses, if the call asks for it.
template <class Call>
void reduce(const Call& x, const Launch& launch) {
  if (!x.reduced.present()) return;
  LossReduction reduction;
  reduction.losses = x.loss, reduction.reduced = x.reduced, reduction.mean = x.mean;
  if constexpr (requires { x.mask; })
    reduction.mask = x.mask;
  else
    reduction.target = x.target;
  if constexpr (requires { x.options.ignore_index; }) reduction.ignore_index = x.options.ignore_index;
  if constexpr (requires { x.ignore_index; }) reduction.ignore_index = x.ignore_index;
  run(reduction, launch);
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

#ifndef MONOIDREDUCE_WITH_CUDA
std::int64_t load_kernels(const std::string&, const std::vector<std::string>&) {
  throw Error("this build of monoidreduce is CPU-only: it loads no kernels");
}
#endif

template <class Call>
void run(const Call& x, const Launch& launch, const Plan* plan) {
  constexpr const auto& description = kDescription<Call>;
  const TensorView& tensor = leading(x);
  check(launch);
  check(x);
  if (!tensor.is_cuda()) {
    run_on_cpu(x, launch);
  } else if constexpr (!description.has(kGpus | kSimt | kSm80 | kSm90)) {
    require(false, description.name, ": expected tensors on the CPU, got one on cuda:", tensor.cuda_device);
  } else if constexpr (kWithCuda) {
    run_on_cuda(x, launch, plan);
  } else {
    throw Error(
        message(description.name, ": expected tensors on the CPU, got one on cuda:", tensor.cuda_device,
                ". This build of monoidreduce is CPU-only; for GPUs, install it again where nvcc is, with ",
                "the environment variable MONOIDREDUCE_CUDA=ON"));
  }
  if constexpr (requires { x.loss, x.reduced; }) reduce(x, launch);
}

// Instantiates run() for every call.
namespace {
template <class... Each>
constexpr auto functions(CallList<Each...>) {
  return std::tuple(static_cast<void (*)(const Each&, const Launch&, const Plan*)>(&run<Each>)...);
}
[[gnu::used]] constexpr auto kFunctions = functions(Calls{});
}  // namespace

}  // namespace monoidreduce
