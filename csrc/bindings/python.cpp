// The Python module monoidreduce._C: each operator's tensors and options as its argument struct, and nothing
// else. The package passes them by position: five names cost as much host time as six tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "calls.h"
#include "monoidreduce/checks.h"
#include "monoidreduce/operators.h"
#include "monoidreduce/path_counter.h"
#include "tensor_caster.h"

namespace monoidreduce::python {
namespace {

using namespace pybind11::literals;

template <class Arguments>
void run(void (*op)(const Arguments&, const Launch&), const Arguments& arguments, int threads,
         std::uintptr_t stream, bool deterministic = false, bool tf32 = false) {
  const py::gil_scoped_release release;
  op(arguments, {threads, reinterpret_cast<void*>(stream), deterministic, tf32});
}

// Losses of tokens, and if reduced is present, what is left of them.
template <class Arguments>
void run(void (*op)(const Arguments&, const Launch&), const Arguments& arguments,
         const LossReduction& reduction, int threads, std::uintptr_t stream) {
  if (reduction.reduced.present()) check(reduction);
  run(op, arguments, threads, stream);
  if (reduction.reduced.present()) run(reduce_losses, reduction, threads, stream);
}

std::vector<std::string> split(const char* list) {
  std::vector<std::string> items;
  std::istringstream text(list);
  for (std::string item; std::getline(text, item, ',');) items.push_back(item);
  return items;
}

py::object text_or_none(const char* text) { return *text ? py::object(py::str(text)) : py::none(); }

py::dict build_info() {
#ifdef MONOIDREDUCE_WITH_CUDA
  constexpr bool cuda = true;
#else
  constexpr bool cuda = false;
#endif
  return py::dict("version"_a = MONOIDREDUCE_BUILD_VERSION, "compiler"_a = MONOIDREDUCE_BUILD_COMPILER,
                  "cpu_isas"_a = split(MONOIDREDUCE_BUILD_CPU_ISAS), "cuda"_a = cuda,
                  "cuda_version"_a = text_or_none(MONOIDREDUCE_BUILD_CUDA_VERSION),
                  "cuda_architectures"_a = split(MONOIDREDUCE_BUILD_CUDA_ARCHS),
                  "cpu_only_reason"_a = text_or_none(MONOIDREDUCE_BUILD_CPU_ONLY_REASON));
}

// (tier, reason, elements of scratch, does it add to the rows' gradient, (rows, hidden units) of a part).
template <class Call>
void define_mlp_tier(py::module_& m, const char* name, Tier (*tier_of)(const Call&, const Launch&)) {
  m.def(
      name,
      [tier_of](Tensor<"x"> x, Tensor<"w1"> w1, Tensor<"w2"> w2, Tensor<"bias1"> bias1,
                std::int64_t workspace, bool tf32, bool deterministic) {
        Call call;
        call.x = x, call.w1 = w1, call.w2 = w2, call.bias1 = bias1, call.workspace = workspace;
        const Tier tier = tier_of(call, {1, nullptr, deterministic, tf32});
        return std::make_tuple(tier.name, tier.reason, tier.scratch, tier.adds_rows,
                               std::make_tuple(tier.part.rows, tier.part.columns));
      },
      "x"_a, "w1"_a, "w2"_a, "bias1"_a, "workspace"_a, "tf32"_a, "deterministic"_a);
}

void define_loss_tiers(py::module_& m) {
  const auto tuple = [](const Tier& tier) {
    return std::make_tuple(tier.name, tier.reason, tier.scratch, tier.adds_rows);
  };
  m.def(
      "cross_entropy_forward_tier",
      [tuple](Tensor<"x"> x, Tensor<"weight"> weight, Tensor<"bias"> bias, Tensor<"kept"> kept,
              double logit_scale) {
        CrossEntropyForward call;
        call.x = x, call.weight = weight, call.bias = bias, call.kept = kept;
        call.options.logit_scale = logit_scale;
        return tuple(cross_entropy_forward_tier(call, {}));
      },
      "x"_a, "weight"_a, "bias"_a, "kept"_a, "logit_scale"_a);
  m.def(
      "cross_entropy_backward_tier",
      [tuple](Tensor<"x"> x, Tensor<"weight"> weight, Tensor<"bias"> bias, double logit_scale,
              std::int64_t workspace, bool deterministic) {
        CrossEntropyBackward call;
        call.x = x, call.weight = weight, call.bias = bias;
        call.options.logit_scale = logit_scale, call.options.workspace = workspace;
        return tuple(cross_entropy_backward_tier(call, {1, nullptr, deterministic}));
      },
      "x"_a, "weight"_a, "bias"_a, "logit_scale"_a, "workspace"_a, "deterministic"_a);
  m.def(
      "distillation_forward_tier",
      [tuple](Tensor<"x"> x, Tensor<"weight"> weight, Tensor<"teacher_x"> teacher_x,
              Tensor<"teacher_weight"> teacher_weight, Tensor<"kept"> kept, double temperature) {
        DistillationForward call;
        call.x = x, call.weight = weight, call.teacher_x = teacher_x, call.teacher_weight = teacher_weight;
        call.kept = kept, call.options.temperature = temperature;
        return tuple(distillation_forward_tier(call, {}));
      },
      "x"_a, "weight"_a, "teacher_x"_a, "teacher_weight"_a, "kept"_a, "temperature"_a);
  m.def(
      "distillation_backward_tier",
      [tuple](Tensor<"x"> x, Tensor<"weight"> weight, Tensor<"teacher_x"> teacher_x,
              Tensor<"teacher_weight"> teacher_weight, double temperature, std::int64_t workspace,
              bool deterministic) {
        DistillationBackward call;
        call.x = x, call.weight = weight, call.teacher_x = teacher_x, call.teacher_weight = teacher_weight;
        call.options.temperature = temperature, call.options.workspace = workspace;
        return tuple(distillation_backward_tier(call, {1, nullptr, deterministic}));
      },
      "x"_a, "weight"_a, "teacher_x"_a, "teacher_weight"_a, "temperature"_a, "workspace"_a,
      "deterministic"_a);
  m.def(
      "logsumexp_forward_tier",
      [tuple](Tensor<"a"> a, Tensor<"b"> b, double scale) {
        LogSumExpForward call;
        call.a = a, call.b = b, call.scale = scale;
        return tuple(logsumexp_forward_tier(call, {}));
      },
      "a"_a, "b"_a, "scale"_a);
  m.def(
      "logsumexp_backward_tier",
      [tuple](Tensor<"a"> a, Tensor<"b"> b, double scale, std::int64_t workspace, bool deterministic) {
        LogSumExpBackward call;
        call.a = a, call.b = b, call.scale = scale, call.workspace = workspace;
        return tuple(logsumexp_backward_tier(call, {1, nullptr, deterministic}));
      },
      "a"_a, "b"_a, "scale"_a, "workspace"_a, "deterministic"_a);
  m.def(
      "can_keep",
      [](int device, std::int64_t width, std::int64_t other_width, double scale, bool deterministic) {
        return can_keep(device, width, other_width, scale, {1, nullptr, deterministic});
      },
      "device"_a, "width"_a, "other_width"_a, "scale"_a, "deterministic"_a);
}

void define_cross_entropy(py::module_& m) {
  m.def(
      "cross_entropy_forward",
      [](Tensor<"x"> x, Tensor<"weight"> weight, Tensor<"bias"> bias, Tensor<"target"> target,
         Tensor<"loss"> loss, Tensor<"reduced"> reduced, Tensor<"lse"> lse, Tensor<"lse_low"> lse_low,
         Tensor<"scratch"> scratch, Tensor<"kept"> kept, Tensor<"kept_upstream"> kept_upstream,
         Tensor<"order"> order, Tensor<"gathered"> gathered, bool mean, double logit_scale, double softcap,
         std::int64_t ignore_index, double label_smoothing, double z_loss, int threads,
         std::uintptr_t stream) {
        run(cross_entropy_forward,
            {.x = x,
             .weight = weight,
             .bias = bias,
             .target = target,
             .loss = loss,
             .lse = lse,
             .lse_low = lse_low,
             .scratch = scratch,
             .kept = kept,
             .kept_upstream = kept_upstream,
             .order = order,
             .gathered = gathered,
             .options = {logit_scale, softcap, label_smoothing, z_loss, ignore_index, 0}},
            {.losses = loss,
             .target = target,
             .mask = {},
             .reduced = reduced,
             .ignore_index = ignore_index,
             .mean = mean},
            threads, stream);
      },
      "x"_a, "weight"_a, "bias"_a, "target"_a, "loss"_a, "reduced"_a, "lse"_a, "lse_low"_a, "scratch"_a,
      "kept"_a, "kept_upstream"_a, "order"_a, "gathered"_a, "mean"_a, "logit_scale"_a, "softcap"_a,
      "ignore_index"_a, "label_smoothing"_a, "z_loss"_a, "threads"_a, "stream"_a);
  m.def(
      "cross_entropy_backward",
      [](Tensor<"grad_loss"> grad_loss, Tensor<"grad_lse"> grad_lse, Tensor<"x"> x, Tensor<"weight"> weight,
         Tensor<"bias"> bias, Tensor<"target"> target, Tensor<"lse"> lse, Tensor<"lse_low"> lse_low,
         Tensor<"dx"> dx, Tensor<"dweight"> dweight, Tensor<"dbias"> dbias, double logit_scale,
         double softcap, std::int64_t ignore_index, double label_smoothing, double z_loss,
         std::int64_t workspace, bool deterministic, int threads, std::uintptr_t stream) {
        run(cross_entropy_backward,
            {.grad_loss = grad_loss,
             .grad_lse = grad_lse,
             .x = x,
             .weight = weight,
             .bias = bias,
             .target = target,
             .lse = lse,
             .lse_low = lse_low,
             .d_x = dx,
             .d_weight = dweight,
             .d_bias = dbias,
             .options = {logit_scale, softcap, label_smoothing, z_loss, ignore_index, workspace}},
            threads, stream, deterministic);
      },
      "grad_loss"_a, "grad_lse"_a, "x"_a, "weight"_a, "bias"_a, "target"_a, "lse"_a, "lse_low"_a, "dx"_a,
      "dweight"_a, "dbias"_a, "logit_scale"_a, "softcap"_a, "ignore_index"_a, "label_smoothing"_a, "z_loss"_a,
      "workspace"_a, "deterministic"_a, "threads"_a, "stream"_a);
}

void define_local_gradients(py::module_& m) {
  m.def(
      "cross_entropy_local_gradient",
      [](Tensor<"grad_loss"> grad_loss, Tensor<"grad_lse"> grad_lse, Tensor<"x"> x, Tensor<"weight"> weight,
         Tensor<"bias"> bias, Tensor<"target"> target, Tensor<"lse"> lse, Tensor<"lse_low"> lse_low,
         Tensor<"out"> out, Tensor<"sums"> sums, Tensor<"order"> order, std::int64_t first_class,
         std::int64_t classes, double logit_scale, double softcap, std::int64_t ignore_index,
         double label_smoothing, double z_loss, int threads, std::uintptr_t stream) {
        run(cross_entropy_local_gradient,
            {.grad_loss = grad_loss,
             .grad_lse = grad_lse,
             .x = x,
             .weight = weight,
             .bias = bias,
             .target = target,
             .lse = lse,
             .lse_low = lse_low,
             .out = out,
             .sums = sums,
             .order = order,
             .first_class = first_class,
             .classes = classes,
             .options = {logit_scale, softcap, label_smoothing, z_loss, ignore_index, 0}},
            threads, stream);
      },
      "grad_loss"_a, "grad_lse"_a, "x"_a, "weight"_a, "bias"_a, "target"_a, "lse"_a, "lse_low"_a, "out"_a,
      "sums"_a, "order"_a, "first_class"_a, "classes"_a, "logit_scale"_a, "softcap"_a, "ignore_index"_a,
      "label_smoothing"_a, "z_loss"_a, "threads"_a, "stream"_a);
  m.def(
      "distillation_local_gradient",
      [](Tensor<"grad_loss"> grad_loss, Tensor<"x"> x, Tensor<"weight"> weight, Tensor<"teacher_x"> teacher_x,
         Tensor<"teacher_weight"> teacher_weight, Tensor<"mask"> mask, Tensor<"stats"> stats,
         Tensor<"out"> out, Tensor<"teacher_out"> teacher_out, Tensor<"order"> order, int kind,
         double temperature, int threads, std::uintptr_t stream) {
        run(distillation_local_gradient,
            {.grad_loss = grad_loss,
             .x = x,
             .weight = weight,
             .teacher_x = teacher_x,
             .teacher_weight = teacher_weight,
             .mask = mask,
             .stats = stats,
             .out = out,
             .teacher_out = teacher_out,
             .order = order,
             .options = {static_cast<DistillationLoss>(kind), temperature, 0}},
            threads, stream);
      },
      "grad_loss"_a, "x"_a, "weight"_a, "teacher_x"_a, "teacher_weight"_a, "mask"_a, "stats"_a, "out"_a,
      "teacher_out"_a, "order"_a, "kind"_a, "temperature"_a, "threads"_a, "stream"_a);
  m.def(
      "logsumexp_local_gradient",
      [](Tensor<"grad_lse"> grad_lse, Tensor<"a"> a, Tensor<"b"> b, Tensor<"lse"> lse,
         Tensor<"lse_low"> lse_low, Tensor<"out"> out, double scale, int threads, std::uintptr_t stream) {
        run(logsumexp_local_gradient,
            {.grad_lse = grad_lse,
             .a = a,
             .b = b,
             .lse = lse,
             .lse_low = lse_low,
             .out = out,
             .scale = scale},
            threads, stream);
      },
      "grad_lse"_a, "a"_a, "b"_a, "lse"_a, "lse_low"_a, "out"_a, "scale"_a, "threads"_a, "stream"_a);
}

void define_scale_rows(py::module_& m) {
  m.def(
      "scale_rows",
      [](Tensor<"x"> x, Tensor<"factor"> factor, Tensor<"out"> out, Tensor<"order"> order, bool scatters,
         int threads, std::uintptr_t stream) {
        run(scale_rows, {.x = x, .out = out, .factor = factor, .order = order, .scatters = scatters}, threads,
            stream);
      },
      "x"_a, "factor"_a, "out"_a, "order"_a, "scatters"_a, "threads"_a, "stream"_a);
  m.def(
      "order_rows",
      [](Tensor<"target"> target, Tensor<"mask"> mask, Tensor<"order"> order, std::int64_t ignore_index,
         int threads, std::uintptr_t stream) {
        run(order_rows, {.target = target, .mask = mask, .order = order, .ignore_index = ignore_index},
            threads, stream);
      },
      "target"_a, "mask"_a, "order"_a, "ignore_index"_a, "threads"_a, "stream"_a);
  m.def(
      "rows_product",
      [](Tensor<"a"> a, Tensor<"b"> b, Tensor<"factor"> factor, Tensor<"out"> out, Tensor<"order"> order,
         int threads, std::uintptr_t stream) {
        run(rows_product, {.a = a, .b = b, .out = out, .factor = factor, .order = order}, threads, stream);
      },
      "a"_a, "b"_a, "factor"_a, "out"_a, "order"_a, "threads"_a, "stream"_a);
  m.def(
      "columns_product",
      [](Tensor<"a"> a, Tensor<"b"> b, Tensor<"scale"> scale, Tensor<"out"> out, Tensor<"order"> order,
         int threads, std::uintptr_t stream) {
        run(columns_product, {.a = a, .b = b, .scale = scale, .out = out, .order = order}, threads, stream);
      },
      "a"_a, "b"_a, "scale"_a, "out"_a, "order"_a, "threads"_a, "stream"_a);
}

void define_distillation(py::module_& m) {
  m.def(
      "distillation_forward",
      [](Tensor<"x"> x, Tensor<"weight"> weight, Tensor<"teacher_x"> teacher_x,
         Tensor<"teacher_weight"> teacher_weight, Tensor<"mask"> mask, Tensor<"loss"> loss,
         Tensor<"reduced"> reduced, Tensor<"stats"> stats, Tensor<"scratch"> scratch, Tensor<"kept"> kept,
         Tensor<"teacher_kept"> teacher_kept, Tensor<"kept_upstream"> kept_upstream, Tensor<"order"> order,
         Tensor<"gathered"> gathered, Tensor<"teacher_gathered"> teacher_gathered, bool mean, int kind,
         double temperature, int threads, std::uintptr_t stream) {
        run(distillation_forward,
            {.x = x,
             .weight = weight,
             .teacher_x = teacher_x,
             .teacher_weight = teacher_weight,
             .mask = mask,
             .loss = loss,
             .stats = stats,
             .scratch = scratch,
             .kept = kept,
             .teacher_kept = teacher_kept,
             .kept_upstream = kept_upstream,
             .order = order,
             .gathered = gathered,
             .teacher_gathered = teacher_gathered,
             .options = {static_cast<DistillationLoss>(kind), temperature, 0}},
            {.losses = loss, .target = {}, .mask = mask, .reduced = reduced, .ignore_index = 0, .mean = mean},
            threads, stream);
      },
      "x"_a, "weight"_a, "teacher_x"_a, "teacher_weight"_a, "mask"_a, "loss"_a, "reduced"_a, "stats"_a,
      "scratch"_a, "kept"_a, "teacher_kept"_a, "kept_upstream"_a, "order"_a, "gathered"_a,
      "teacher_gathered"_a, "mean"_a, "kind"_a, "temperature"_a, "threads"_a, "stream"_a);
  m.def(
      "distillation_backward",
      [](Tensor<"grad_loss"> grad_loss, Tensor<"x"> x, Tensor<"weight"> weight, Tensor<"teacher_x"> teacher_x,
         Tensor<"teacher_weight"> teacher_weight, Tensor<"mask"> mask, Tensor<"stats"> stats, Tensor<"dx"> dx,
         Tensor<"dweight"> dweight, Tensor<"dteacher_x"> dteacher_x,
         Tensor<"dteacher_weight"> dteacher_weight, int kind, double temperature, std::int64_t workspace,
         bool deterministic, int threads, std::uintptr_t stream) {
        run(distillation_backward,
            {.grad_loss = grad_loss,
             .x = x,
             .weight = weight,
             .teacher_x = teacher_x,
             .teacher_weight = teacher_weight,
             .mask = mask,
             .stats = stats,
             .d_x = dx,
             .d_weight = dweight,
             .d_teacher_x = dteacher_x,
             .d_teacher_weight = dteacher_weight,
             .options = {static_cast<DistillationLoss>(kind), temperature, workspace}},
            threads, stream, deterministic);
      },
      "grad_loss"_a, "x"_a, "weight"_a, "teacher_x"_a, "teacher_weight"_a, "mask"_a, "stats"_a, "dx"_a,
      "dweight"_a, "dteacher_x"_a, "dteacher_weight"_a, "kind"_a, "temperature"_a, "workspace"_a,
      "deterministic"_a, "threads"_a, "stream"_a);
}

void define_mlp(py::module_& m) {
  m.def(
      "mlp_forward",
      [](Tensor<"x"> x, Tensor<"w1"> w1, Tensor<"w2"> w2, Tensor<"bias1"> bias1, Tensor<"bias2"> bias2,
         Tensor<"out"> out, Tensor<"scratch"> scratch, int activation, int threads, std::uintptr_t stream,
         bool tf32) {
        run(mlp_forward,
            {.x = x,
             .w1 = w1,
             .w2 = w2,
             .bias1 = bias1,
             .bias2 = bias2,
             .out = out,
             .scratch = scratch,
             .activation = static_cast<ActivationKind>(activation)},
            threads, stream, false, tf32);
      },
      "x"_a, "w1"_a, "w2"_a, "bias1"_a, "bias2"_a, "out"_a, "scratch"_a, "activation"_a, "threads"_a,
      "stream"_a, "tf32"_a = false);
  m.def(
      "mlp_backward",
      [](Tensor<"grad_out"> grad_out, Tensor<"x"> x, Tensor<"w1"> w1, Tensor<"w2"> w2, Tensor<"bias1"> bias1,
         Tensor<"dx"> dx, Tensor<"dw1"> dw1, Tensor<"dw2"> dw2, Tensor<"dbias1"> dbias1, int activation,
         bool deterministic, int threads, std::uintptr_t stream, bool tf32) {
        run(mlp_backward,
            {.grad_out = grad_out,
             .x = x,
             .w1 = w1,
             .w2 = w2,
             .bias1 = bias1,
             .d_x = dx,
             .d_w1 = dw1,
             .d_w2 = dw2,
             .d_bias1 = dbias1,
             .activation = static_cast<ActivationKind>(activation)},
            threads, stream, deterministic, tf32);
      },
      "grad_out"_a, "x"_a, "w1"_a, "w2"_a, "bias1"_a, "dx"_a, "dw1"_a, "dw2"_a, "dbias1"_a, "activation"_a,
      "deterministic"_a, "threads"_a, "stream"_a, "tf32"_a = false);
}

void define_mlp_parts(py::module_& m) {
  m.def(
      "mlp_hidden",
      [](Tensor<"x"> x, Tensor<"w1"> w1, Tensor<"bias1"> bias1, Tensor<"out"> out, int activation,
         int threads, std::uintptr_t stream) {
        run(mlp_hidden,
            {.x = x,
             .w1 = w1,
             .bias1 = bias1,
             .out = out,
             .activation = static_cast<ActivationKind>(activation)},
            threads, stream);
      },
      "x"_a, "w1"_a, "bias1"_a, "out"_a, "activation"_a, "threads"_a, "stream"_a);
  m.def(
      "mlp_local_gradient",
      [](Tensor<"grad_out"> grad_out, Tensor<"x"> x, Tensor<"w1"> w1, Tensor<"w2"> w2, Tensor<"bias1"> bias1,
         Tensor<"out"> out, Tensor<"hidden"> hidden, Tensor<"sums"> sums, int activation, int threads,
         std::uintptr_t stream) {
        run(mlp_local_gradient,
            {.grad_out = grad_out,
             .x = x,
             .w1 = w1,
             .w2 = w2,
             .bias1 = bias1,
             .out = out,
             .hidden = hidden,
             .sums = sums,
             .activation = static_cast<ActivationKind>(activation)},
            threads, stream);
      },
      "grad_out"_a, "x"_a, "w1"_a, "w2"_a, "bias1"_a, "out"_a, "hidden"_a, "sums"_a, "activation"_a,
      "threads"_a, "stream"_a);
}

void define_logsumexp(py::module_& m) {
  m.def(
      "logsumexp_forward",
      [](Tensor<"a"> a, Tensor<"b"> b, Tensor<"lse"> lse, Tensor<"lse_low"> lse_low,
         Tensor<"scratch"> scratch, double scale, int threads, std::uintptr_t stream) {
        run(logsumexp_forward,
            {.a = a, .b = b, .lse = lse, .lse_low = lse_low, .scratch = scratch, .scale = scale}, threads,
            stream);
      },
      "a"_a, "b"_a, "lse"_a, "lse_low"_a, "scratch"_a, "scale"_a, "threads"_a, "stream"_a);
  m.def(
      "logsumexp_backward",
      [](Tensor<"grad_lse"> grad_lse, Tensor<"a"> a, Tensor<"b"> b, Tensor<"lse"> lse,
         Tensor<"lse_low"> lse_low, Tensor<"da"> da, Tensor<"db"> db, double scale, bool deterministic,
         int threads, std::uintptr_t stream) {
        run(logsumexp_backward,
            {.grad_lse = grad_lse,
             .a = a,
             .b = b,
             .lse = lse,
             .lse_low = lse_low,
             .d_a = da,
             .d_b = db,
             .scale = scale},
            threads, stream, deterministic);
      },
      "grad_lse"_a, "a"_a, "b"_a, "lse"_a, "lse_low"_a, "da"_a, "db"_a, "scale"_a, "deterministic"_a,
      "threads"_a, "stream"_a);
}

// (rows, columns) that the CPU engine computes at a time, forward and backward.
void define_cpu_tiles(py::module_& m) {
  m.def(
      "cpu_tiles",
      [](Tensor<"a"> a, Tensor<"b"> b, Tensor<"other_a"> other_a, Tensor<"other_b"> other_b,
         Tensor<"payload"> payload, bool bias_gradient, int threads) {
        FoldProblem problem{};
        problem.a = a, problem.b = b, problem.other_a = other_a, problem.other_b = other_b;
        problem.payload = payload;
        const auto [forward, backward] = cpu_tiles(problem, bias_gradient, threads);
        return std::make_tuple(std::make_tuple(forward.rows, forward.columns),
                               std::make_tuple(backward.rows, backward.columns));
      },
      "a"_a, "b"_a, "other_a"_a, "other_b"_a, "payload"_a, "bias_gradient"_a, "threads"_a);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  Torch::load();
  Calls calls(m);
  calls.define(&attention_forward);
  calls.define(&attention_backward);
  calls.define_tier(&attention_forward_tier);
  calls.define_tier(&attention_backward_tier);
  define_mlp_tier(m, "mlp_forward_tier", &mlp_forward_tier);
  define_mlp_tier(m, "mlp_backward_tier", &mlp_backward_tier);
  define_loss_tiers(m);
  define_cross_entropy(m);
  define_local_gradients(m);
  define_scale_rows(m);
  define_distillation(m);
  define_mlp(m);
  define_mlp_parts(m);
  define_logsumexp(m);
  m.def("build_info", &build_info);
  m.def("cpu_isa", py::overload_cast<>(&cpu_isa));
  m.def("cpu_isa_of", [](Tensor<"t"> t) { return cpu_isa(TensorView(t).dtype); }, "t"_a);
  m.def("cpu_isas", &cpu_isas);
  define_cpu_tiles(m);
  m.def("path_counts", &path_counts);
}

}  // namespace monoidreduce::python
