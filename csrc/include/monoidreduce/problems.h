// How each operator is a fold: one function per operator turns its tensors into a FoldProblem. Both engines use it,
// forward and backward.
//
// Always inlined: an out-of-line copy compiled for AVX-512 could be picked by the linker for a baseline machine.
#pragma once

#include "monoidreduce/operators.h"

namespace monoidreduce {

// A [rows, width] matrix as [1, 1, rows, width].
[[gnu::always_inline]] inline TensorView as_rows(const TensorView& m) {
  if (!m.present()) return m;
  TensorView t = m;
  t.rank = 4;
  t.size[0] = t.size[1] = 1, t.size[2] = m.size[0], t.size[3] = m.size[1];
  t.stride[0] = t.stride[1] = 0, t.stride[2] = m.stride[0], t.stride[3] = m.stride[1];
  return t;
}

[[gnu::always_inline]] inline TensorView transposed(const TensorView& m) {
  TensorView t = m;
  if (!m.present()) return t;
  t.size[0] = m.size[1], t.size[1] = m.size[0];
  t.stride[0] = m.stride[1], t.stride[1] = m.stride[0];
  return t;
}

// A [columns] vector as a [1, 1, rows, columns] bias, the same for every row.
[[gnu::always_inline]] inline TensorView as_column_bias(const TensorView& v, std::int64_t rows) {
  if (!v.present()) return v;
  TensorView t = v;
  t.rank = 4;
  t.size[0] = t.size[1] = 1, t.size[2] = rows, t.size[3] = v.size[0];
  t.stride[0] = t.stride[1] = t.stride[2] = 0, t.stride[3] = v.stride[0];
  return t;
}

// The order of the active rows, for calls that may skip rows.
template <class Arguments>
[[gnu::always_inline]] inline TensorView order_of(const Arguments& x) {
  if constexpr (requires { x.order; }) {
    return x.order;
  } else {
    return {};
  }
}

template <class Arguments>
[[gnu::always_inline]] inline FoldProblem cross_entropy_problem(const Arguments& x) {
  return {.a = as_rows(x.x),
          .b = as_rows(x.weight),
          .other_a = {},
          .other_b = {},
          .payload = {},
          .bias = as_column_bias(x.bias, x.x.size[0]),
          .out_bias = {},
          .score = {.scale = x.options.logit_scale, .softcap = x.options.softcap, .bias_inside = true},
          .range = {},
          .order = order_of(x)};
}

template <class Arguments>
[[gnu::always_inline]] inline FoldProblem distillation_problem(const Arguments& x) {
  return {.a = as_rows(x.x),
          .b = as_rows(x.weight),
          .other_a = as_rows(x.teacher_x),
          .other_b = as_rows(x.teacher_weight),
          .payload = {},
          .bias = {},
          .out_bias = {},
          .score = {.scale = 1 / x.options.temperature},
          .range = {},
          .order = order_of(x)};
}

template <class Arguments>
[[gnu::always_inline]] inline FoldProblem mlp_problem(const Arguments& x, const TensorView& out_bias = {}) {
  return {.a = as_rows(x.x),
          .b = as_rows(x.w1),
          .other_a = {},
          .other_b = {},
          .payload = as_rows(transposed(x.w2)),
          .bias = as_column_bias(x.bias1, x.x.size[0]),
          .out_bias = out_bias,
          .score = {.bias_inside = true},
          .range = {}};
}

// The pre-activations of the hidden units as scores, without a fold.
inline FoldProblem mlp_hidden_problem(const MlpHidden& x) {
  return {.a = as_rows(x.x),
          .b = as_rows(x.w1),
          .other_a = {},
          .other_b = {},
          .payload = {},
          .bias = as_column_bias(x.bias1, x.x.size[0]),
          .out_bias = {},
          .score = {.bias_inside = true},
          .range = {}};
}

// The same, and as second score <grad_out, w2>: the derivative with respect to the hidden value.
inline FoldProblem mlp_gradient_problem(const MlpLocalGradient& x) {
  return {.a = as_rows(x.x),
          .b = as_rows(x.w1),
          .other_a = as_rows(x.grad_out),
          .other_b = as_rows(transposed(x.w2)),
          .payload = {},
          .bias = as_column_bias(x.bias1, x.x.size[0]),
          .out_bias = {},
          .score = {.bias_inside = true},
          .range = {}};
}

template <class Arguments>
[[gnu::always_inline]] inline FoldProblem logsumexp_problem(const Arguments& x) {
  return {.a = as_rows(x.a),
          .b = as_rows(x.b),
          .other_a = {},
          .other_b = {},
          .payload = {},
          .bias = {},
          .out_bias = {},
          .score = {.scale = x.scale},
          .range = {}};
}

// A matrix product as scores: the width is the dimension that is summed over.
inline FoldProblem product_problem(const TensorView& a, const TensorView& b, const TensorView& order) {
  return {.a = as_rows(a),
          .b = as_rows(b),
          .other_a = {},
          .other_b = {},
          .payload = {},
          .bias = {},
          .out_bias = {},
          .score = {},
          .range = {},
          .order = order};
}
inline FoldProblem rows_product_problem(const RowsProduct& x) {
  return product_problem(x.a, transposed(x.b), x.order);
}
inline FoldProblem columns_product_problem(const ColumnsProduct& x) {
  return product_problem(transposed(x.a), transposed(x.b), x.order);
}

}  // namespace monoidreduce
