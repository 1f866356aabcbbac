// Checks that a plan was made for a call. With another plan, kernels would read or write beyond their tensors.
#pragma once

#include <string_view>

#include "monoidreduce/error.h"
#include "plan.h"

namespace monoidreduce {

// The plan of a call that may hold neither dlogits nor hidden values.
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
// Checks the dtypes of gradients, which depend on whether the plan's kernels write them or add to them.
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
  if constexpr (requires { x.d_w1; }) {
    check_dtype("dx", x.d_x, of_rows), check_dtype("dw1", x.d_w1, of_columns),
        check_dtype("dw2", x.d_w2, of_columns);
    // In planes the kernel of dw1 sums dbias1.
    require(!plan.can().planes || !x.d_bias1.present() || x.d_w1.present(),
            "dw1: expected a tensor beside dbias1, as the plan says, got none");
  }
  if constexpr (requires { x.mean, x.d_a; })
    check_dtype("da", x.d_a, plan.narrow ? same : sums), check_dtype("db", x.d_b, plan.narrow ? same : sums);
}

// Throws: the plan's family has no kernels for the call.
template <class Call>
[[noreturn]] void refuse(const Call&, const Plan& plan) {
  constexpr const auto& description = kDescription<Call>;
  constexpr const char* kExpected = description.has(kSimt)   ? "on the tier simt"
                                    : description.has(kSm80) ? "on tensor cores"
                                                             : "on the tier sm90";
  throw std::invalid_argument(
      message("plan: expected one ", kExpected, " for ", description.name, ", got ", text(plan)));
}

// Checks the mean that a narrow logsumexp_matmul saves in forward and needs in backward.
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

// Checks the dtype of an MLP's result, which tensor-core kernels round.
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

// If frames are present, dlogits are made from softmax weights that forward saved.
template <class Call>
void check_frames(const Call& x, const Plan& plan) {
  if constexpr (requires { x.frames, x.log_probs; })
    require(!x.frames.present() || plan.can().keeps,
            "frames: expected none on a tier other than sm90, got a tensor");
}

// The operands in planes, which kernels read instead of the operands themselves.
template <class Call>
void check_planes(const Call& x, const Plan& plan) {
  if constexpr (requires { x.row_planes; })
    check_presence("row_planes", x.row_planes, plan.can().planes),
        check_presence("column_planes", x.column_planes, plan.can().planes);
  if constexpr (requires { x.other_row_planes; }) {
    const bool two = plan.can().planes && problem_of(x).other_a.present();
    check_presence("other_row_planes", x.other_row_planes, two);
    check_presence("other_column_planes", x.other_column_planes, two);
  }
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
  require(!plan.part, "plan: expected that of a whole MLP, got one in parts");
  if constexpr (requires { x.kept; }) {
    require((x.kept.present() ? x.kept.size[1] : 0) == plan.saved.columns, "kept: expected ",
            plan.saved.columns, " columns, as the plan says, got ", x.kept.present() ? x.kept.size[1] : 0);
  }
  check_scratch(x, plan);
  check_planes(x, plan);
  check_order(x, plan);
  check_mean(x, plan);
  check_gradients(x, plan);
  check_result(x, plan);
}

// Checks a call that is a part of a pass (some of its columns, and for an MLP in parts some of its rows) against the pass's
// plan.
template <class Call>
void check_part(const Call& x, const Plan& plan, const char* pass) {
  require(plan.call == std::string_view(pass), "plan: expected that of ", pass, ", got that of ", plan.call);
  const PlannedSizes part = planned_sizes(problem_of(x)), &all = plan.sizes;
  require(part.rows <= all.rows && part.columns <= all.columns && part.width == all.width &&
              part.dtype == all.dtype && part.device == all.device,
          "plan: expected that of a call on these sizes, dtypes and this device, got that of another");
  check_scratch(x, plan);
  check_planes(x, plan);
  check_order(x, plan);
  check_frames(x, plan);
  check_gradients(x, plan);
}

// Whether the call is counted as a deterministic one (path_counter.h): only passes with an order of sums are.
template <class Call>
bool counts_order(const Call& x, const Plan& plan) {
  return plan.deterministic && (requires { x.d_q; } || requires { x.d_x; } || requires { x.d_a; });
}

}  // namespace monoidreduce
