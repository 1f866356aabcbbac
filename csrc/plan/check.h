// Whether a plan is that of a call. No kernel is launched otherwise: it would go beyond its tensors.
#pragma once

#include <string_view>

#include "monoidreduce/error.h"
#include "plan.h"

namespace monoidreduce {

// Of a call that holds no local gradients and no hidden values.
template <class Call>
Plan plan_without_workspace(const Call& given, const DeviceFacts& gpu, const Launch& launch) {
  Call x = given;
  if constexpr (requires { x.workspace; }) x.workspace = 0;
  return plan(x, gpu, launch);
}

inline void check_dtype(const char* name, const TensorView& t, DType expected) {
  require(!t.present() || t.dtype == expected, name, ": expected ", monoidreduce::name(expected),
          ", as the plan says, got ", monoidreduce::name(t.dtype));
}
inline void check_presence(const char* name, const TensorView& t, bool expected) {
  require(t.present() == expected, name, ": expected ", expected ? "a tensor" : "none",
          ", as the plan says, got ", t.present() ? "one" : "none");
}
// Gradients that tensor cores may write, of columns and of rows.
template <class Call>
void check_gradients(const Call& x, const Plan& plan) {
  const DType same = plan.sizes.dtype, sums = accumulation(same);
  const DType of_columns = plan.can().tensor_cores ? same : sums, of_rows = plan.adds_rows ? sums : same;
  if constexpr (requires { x.d_q; }) {
    check_dtype("dq", x.d_q, of_rows), check_dtype("dk", x.d_k, of_columns),
        check_dtype("dv", x.d_v, of_columns);
    if (plan.can().tensor_cores) {
      check_presence("dq", x.d_q, plan.computed.rows), check_presence("dk", x.d_k, plan.computed.columns),
          check_presence("dv", x.d_v, plan.computed.payload);
    }
  }
  if constexpr (requires { x.d_w1; })
    check_dtype("dx", x.d_x, of_rows), check_dtype("dw1", x.d_w1, of_columns),
        check_dtype("dw2", x.d_w2, of_columns);
  if constexpr (requires { x.mean, x.d_a; })
    check_dtype("da", x.d_a, plan.narrow ? same : sums), check_dtype("db", x.d_b, plan.narrow ? same : sums);
}

// A call for which a family has no kernels.
template <class Call>
[[noreturn]] void refuse(const Call&, const Plan& plan) {
  constexpr const auto& description = kDescription<Call>;
  constexpr const char* kExpected = description.has(kSimt)   ? "on the tier simt"
                                    : description.has(kSm80) ? "on tensor cores"
                                                             : "on the tier sm90";
  throw std::invalid_argument(
      message("plan: expected one ", kExpected, " for ", description.name, ", got ", text(plan)));
}

// What a narrow logsumexp_matmul keeps, and needs.
template <class Call>
void check_mean(const Call& x, const Plan& plan) {
  if constexpr (requires { x.lse, x.mean, x.d_a; }) {
    if (plan.choice.family != Family::kSimt && !plan.narrow) refuse(x, plan);
    require(!plan.narrow || !x.d_a.present() || x.mean.present(),
            "mean: expected a tensor beside da, got none");
  } else if constexpr (requires { x.lse, x.mean, x.a; }) {
    check_presence("mean", x.mean, plan.narrow);
  }
}

// The result of an MLP, which tensor cores round.
template <class Call>
void check_result(const Call& x, const Plan& plan) {
  if constexpr (requires { x.bias2; })
    if (plan.can().tensor_cores) check_dtype("out", x.out, plan.sizes.dtype);
}

template <class Call>
void check_order(const Call& x, const Plan& plan) {
  if constexpr (requires { x.order; })
    require(!x.order.present() || plan.can().skips_rows,
            "order: expected none on a tier other than sm90, got a tensor");
}

// A local gradient is made of weights that a forward pass kept where their frames are there.
template <class Call>
void check_frames(const Call& x, const Plan& plan) {
  if constexpr (requires { x.frames, x.log_probs; })
    require(!x.frames.present() || plan.can().keeps,
            "frames: expected none on a tier other than sm90, got a tensor");
}

template <class Call>
void check_scratch(const Call& x, const Plan& plan) {
  if constexpr (requires { x.scratch; }) {
    const std::int64_t elements = x.scratch.present() ? x.scratch.numel() : 0;
    require(elements >= plan.scratch, "scratch: expected ", plan.scratch, " elements, got ", elements);
  }
}

template <class Call>
void check(const Call& x, const Plan& plan) {
  constexpr const char* kName = kDescription<Call>.name;
  require(plan.call == std::string_view(kName), "plan: expected that of ", kName, ", got that of ",
          plan.call);
  require(plan.sizes == planned_sizes(problem_of(x)),
          "plan: expected that of a call on these sizes, dtypes and this device, got that of another");
  require(plan.part.rows == 0, "plan: expected that of a whole MLP, got one in parts");
  if constexpr (requires { x.kept; })
    require((x.kept.present() ? x.kept.size[1] : 0) == plan.kept, "kept: expected ", plan.kept,
            " columns, as the plan says, got ", x.kept.present() ? x.kept.size[1] : 0);
  check_scratch(x, plan);
  check_order(x, plan);
  check_mean(x, plan);
  check_gradients(x, plan);
  check_result(x, plan);
}

// Of some columns of the call, and for an MLP in parts some rows.
template <class Call>
void check_part(const Call& x, const Plan& plan, const char* pass) {
  require(plan.call == std::string_view(pass), "plan: expected that of ", pass, ", got that of ", plan.call);
  const PlannedSizes part = planned_sizes(problem_of(x)), &all = plan.sizes;
  require(part.rows <= all.rows && part.columns <= all.columns && part.width == all.width &&
              part.dtype == all.dtype && part.device == all.device,
          "plan: expected that of a call on these sizes, dtypes and this device, got that of another");
  check_scratch(x, plan);
  check_order(x, plan);
  check_frames(x, plan);
  check_gradients(x, plan);
}

// Is the path that a call takes another one in the deterministic mode.
template <class Call>
bool counts_order(const Call& x, const Plan& plan) {
  return plan.deterministic && (requires { x.d_q; } || requires { x.d_x; } || requires { x.d_a; });
}

}  // namespace monoidreduce
