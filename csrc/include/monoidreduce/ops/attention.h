// Attention: softmax-weighted values. Several query heads may share one key head.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"

namespace monoidreduce {

struct AttentionOptions {
  double scale = 1, softcap = 0;
  std::int64_t left = ColumnRange::kUnbounded,
               right = ColumnRange::kUnbounded;  // the window, see ColumnRange
};
template <std::same_as<AttentionOptions> X>
constexpr auto describe(const X*) {
  constexpr auto is_bound = [](std::int64_t n) { return n >= ColumnRange::kUnbounded; };
  constexpr const char* kBound = "an integer >= 0, or -1 for no bound";
  return fields(option("scale", &X::scale),
                option("softcap", &X::softcap, "a number >= 0, 0 for none", [](double v) { return v >= 0; }),
                option("left", &X::left, kBound, is_bound), option("right", &X::right, kBound, is_bound));
}

template <class Call>
void check_heads(const Call& x) {
  const std::int64_t heads = x.q.size[1], key_heads = x.k.size[1];
  require(heads == 0 || (key_heads > 0 && heads % key_heads == 0),
          "k: expected a number of heads that divides H=", heads, ", got ", key_heads);
}
// out_low: the error of rounding out to 16 bits, in out's dtype.
template <class Call>
void check_low_word(const Call& x) {
  require(!x.out_low.present() || item_size(x.q.dtype) == 2,
          "out_low: expected none unless q has 16 bits, got a tensor");
}
// row_spans, column_spans: instead of a window, the unmasked keys of each query and the unmasked queries of each key, as
// Spans (score.h).
template <class Call>
void check_spans(const Call& x) {
  require(x.row_spans.present() == x.column_spans.present(),
          "row_spans, column_spans: expected both or neither, got one");
  if constexpr (requires { x.bias; })
    require(!x.row_spans.present() || !x.bias.present(),
            "bias: expected none beside row_spans, which kernels for biases do not read, got a tensor");
}
template <class Call>
constexpr auto span_operands() {
  return fields(optional("row_spans", &Call::row_spans, "M span=2", Type::kInt64).dense(),
                optional("column_spans", &Call::column_spans, "N span=2", Type::kInt64)
                    .dense()
                    .where(&check_spans<Call>));
}
// sinks: attention sinks, one score for each head. Each is one more element of the softmax of every row of its head, with
// value 0.
template <class Call>
constexpr auto sink_operand() {
  return optional("sinks", &Call::sinks, "H", Type::kAccumulation).dense();
}
template <class Call>
void check_sink_gradient(const Call& x) {
  require(!x.d_sinks.present() || x.sinks.present(),
          "dsinks: expected none where there are no sinks, got a tensor");
}
template <class Call>
constexpr auto sink_gradient_result() {
  return result("dsinks", &Call::d_sinks, "H", Type::kAccumulation).maybe().where(&check_sink_gradient<Call>);
}
// On CUDA, v may be padded for tensor cores while out is not.
template <class Call>
void check_output_width(const Call& x) {
  if (!x.out.present()) return;  // while the call is planned, out may be absent
  const std::int64_t width = x.out.size[3], of_v = x.v.size[3];
  require(width == of_v || (x.q.is_cuda() && (width + 7) / 8 * 8 == of_v), "out: expected width ", of_v,
          ", got ", width);
}
template <class Call>
constexpr auto attention_operands() {
  return fields(
      tensor("q", &Call::q, "B H M F"), tensor("k", &Call::k, "B Hkv N F").where(&check_heads<Call>),
      tensor("v", &Call::v, "B Hkv N D"),
      optional("bias", &Call::bias, "B H M N", Type::kSameAccumulationOrBool), sink_operand<Call>());
}

struct AttentionForward {
  TensorView q, k, v, bias, sinks, row_spans, column_spans, out, lse, lse_low, out_low;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  AttentionOptions options;
};
template <std::same_as<AttentionForward> X>
constexpr auto describe(const X*) {
  return pass("attention_forward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, attention_operands<X>(),
              span_operands<X>(), result("out", &X::out, "B H M D"),
              result("lse", &X::lse, "B H M", Type::kAccumulation),
              result("lse_low", &X::lse_low, "B H M", Type::kAccumulation),
              result("out_low", &X::out_low, "B H M D").maybe().where(&check_low_word<X>),
              scratch("scratch", &X::scratch), options(&X::options));
}

struct AttentionBackward {
  TensorView grad_out, grad_lse, q, k, v, bias, sinks, row_spans, column_spans, out, lse, lse_low, out_low;
  TensorView d_q, d_k, d_v, d_bias, d_sinks;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  AttentionOptions options;
  bool whole = true;  // k and v are all keys that forward saw; false: a slice of them
};
inline void check_bias_gradient(const AttentionBackward& x) {
  require(!x.d_bias.present() || (x.bias.present() && x.bias.dtype != DType::kBool),
          "dbias: expected none where bias is bool or none, got a tensor");
}
inline void check_cuda_scratch(const AttentionBackward& x) {
  require(x.scratch.present() || !x.q.is_cuda(), "scratch: expected a tensor, got none");
}
template <std::same_as<AttentionBackward> X>
constexpr auto describe(const X*) {
  return pass(
      "attention_backward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, attention_operands<X>(),
      span_operands<X>(), optional("grad_out", &X::grad_out, "B H M D"),
      optional("grad_lse", &X::grad_lse, "B H M", Type::kAccumulation),
      tensor("out", &X::out, "B H M O").where(&check_output_width<X>),
      tensor("lse", &X::lse, "B H M", Type::kAccumulation).dense(),
      tensor("lse_low", &X::lse_low, "B H M", Type::kAccumulation).dense(),
      optional("out_low", &X::out_low, "B H M O").where(&check_low_word<X>),
      gradient("dq", &X::d_q, "B H M F", Type::kPlanGradient),
      gradient("dk", &X::d_k, "B Hkv N F", Type::kPlanGradient),
      gradient("dv", &X::d_v, "B Hkv N D", Type::kPlanGradient),
      gradient("dbias", &X::d_bias, "B H M N", Type::kAccumulation).strided().where(&check_bias_gradient),
      sink_gradient_result<X>(), scratch("scratch", &X::scratch).where(&check_cuda_scratch),
      options(&X::options), option("whole", &X::whole));
}

template <class Call>
[[gnu::always_inline]] inline ColumnRange key_range(const Call& x) {
  if (x.row_spans.present())
    return {.listed = true,
            .of_rows = static_cast<const Span*>(x.row_spans.data),
            .of_columns = static_cast<const Span*>(x.column_spans.data)};
  const std::int64_t shift = x.k.size[2] - x.q.size[2];  // the last query is aligned with the last key
  return ColumnRange{x.options.left, x.options.right, shift}.bounding(x.q.size[2], x.k.size[2]);
}

template <class Call>
[[gnu::always_inline]] inline FoldProblem attention_problem(const Call& x) {
  bool whole = true;
  if constexpr (requires { x.whole; }) whole = x.whole;
  return {.a = x.q,
          .b = x.k,
          .payload = x.v,
          .bias = x.bias,
          .score = {.scale = x.options.scale, .softcap = x.options.softcap, .bias_inside = false},
          .range = key_range(x),
          .whole = whole};
}

}  // namespace monoidreduce
