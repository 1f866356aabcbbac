// float32 matrices in two planes of float16, for tensor cores (device/contraction/split_planes.cuh), and products of them.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/matrix.h"

namespace monoidreduce {

// The width of a plane: that of the matrix, in whole steps of the contraction.
constexpr std::int64_t plane_width(std::int64_t width) { return (width + 63) / 64 * 64; }
// The width of a line that holds both planes and its scale.
constexpr std::int64_t planes_width(std::int64_t width) { return 2 * plane_width(width) + 8; }

// A line of both planes that ends with its scale, as an operand. width: that of the matrix.
inline OperandPlanes planes_of_lines(const TensorView& lines, std::int64_t width) {
  if (!lines.present()) return {};
  const std::int64_t plane = plane_width(width);
  const auto* scales = reinterpret_cast<const float*>(static_cast<const char*>(lines.data) + 2 * plane * 2);
  return {lines, plane, scales, lines.stride[0] / 2, lines.size[0]};
}

// Splits the rows of x, times a factor for each column: out_ik = split(x_ik by_k). Rows of x are dense and 16-byte aligned, with
// memory for a multiple of 4 columns.
struct RowSplit {
  TensorView x, by, out;
};
inline void check_split(const RowSplit& x) {
  require(x.x.dtype == DType::kFloat32, "x: expected float32, got ", name(x.x.dtype));
  require(x.x.size[0] <= 1 || x.x.stride[0] >= (x.x.size[1] + 3) / 4 * 4,
          "x: expected rows with memory for a multiple of 4 columns, got stride ", x.x.stride[0]);
}
template <std::same_as<RowSplit> X>
constexpr auto describe(const X*) {
  constexpr Axis kPlanes{.name = "2 * 64 ceil(D / 64) + 8", .of = "D", .follows = &planes_width};
  return helper("split_rows", kSm90, tensor("x", &X::x, "N D").where(&check_split),
                optional("by", &X::by, "D", Type::kFloat32).dense(),
                result("out", &X::out, {Axis{.name = "N"}, kPlanes}, Type::kFloat16));
}

// Splits x with a scale for each column, times a factor for each row: out_ik = split(x_ik by_i). Lines of out have no scales;
// these are written to `scales`. largest: scratch, 0 at first.
struct ColumnSplit {
  TensorView x, by, largest, out, scales;
};
inline void check_column_split(const ColumnSplit& x) { check_split(RowSplit{x.x, {}, {}}); }
template <std::same_as<ColumnSplit> X>
constexpr auto describe(const X*) {
  constexpr Axis kPlanes{.name = "2 * 64 ceil(D / 64)", .of = "D", .follows = [](std::int64_t width) {
                           return 2 * plane_width(width);
                         }};
  return helper("split_columns", kSm90, tensor("x", &X::x, "N D").where(&check_column_split),
                optional("by", &X::by, "N", Type::kFloat32).dense(),
                result("largest", &X::largest, "D", Type::kFloat32),
                result("out", &X::out, {Axis{.name = "N"}, kPlanes}, Type::kFloat16),
                result("scales", &X::scales, "D", Type::kFloat32));
}

// out = a b in float32, from planes; or out += a b if `adds`. b [K, D] is from split_rows. Without scales a [M, K] is from
// split_rows too. With them a is the transpose of what split_columns was given, [K, M]. The scales of b are not multiplied by:
// a was split with them as factors.
struct PlaneProduct {
  TensorView a, b, scales, out;
  bool adds = false;
};
inline void check_plane_product(const PlaneProduct& x) {
  const std::int64_t terms = x.b.size[0], rows = x.out.size[0];
  const bool transposed = x.scales.present();
  const std::int64_t lines = transposed ? terms : rows,
                     width = transposed ? 2 * plane_width(rows) : planes_width(terms);
  require(x.a.dtype == DType::kFloat16, "a: expected float16, got ", name(x.a.dtype));
  require(x.a.size[0] == lines && x.a.size[1] == width, "a: expected shape [", lines, ", ", width, "], got [",
          x.a.size[0], ", ", x.a.size[1], "]");
  require(x.b.size[1] == planes_width(x.out.size[1]), "b: expected width ", planes_width(x.out.size[1]),
          ", got ", x.b.size[1]);
}
template <std::same_as<PlaneProduct> X>
constexpr auto describe(const X*) {
  return helper("plane_product", kSm90, tensor("a", &X::a, "A P"), tensor("b", &X::b, "K Q"),
                optional("scales", &X::scales, "M", Type::kAccumulation).dense(),
                result("out", &X::out, "M D", Type::kAccumulation).strided().where(&check_plane_product),
                option("adds", &X::adds));
}

// out = a b^T in float32. a [M, K] and b [D, K] are from split_rows.
struct PlaneDots {
  TensorView a, b, out;
};
inline void check_plane_dots(const PlaneDots& x) {
  require(x.a.dtype == DType::kFloat16, "a: expected float16, got ", name(x.a.dtype));
  require(x.a.size[1] % (2 * plane_width(1)) == 8, "a: expected a width of 128 n + 8, got ", x.a.size[1]);
}
template <std::same_as<PlaneDots> X>
constexpr auto describe(const X*) {
  return helper("plane_dots", kSm90, tensor("a", &X::a, "M P").where(&check_plane_dots),
                tensor("b", &X::b, "D P"), result("out", &X::out, "M D", Type::kAccumulation).strided());
}

// The shape of the planes of an operand [lines, width].
constexpr Shape plane_lines(std::string_view lines, std::string_view width) {
  return {Axis{.name = lines}, Axis{.name = "planes", .of = width, .follows = &planes_width}};
}
// The operands of a call in planes: both are present exactly if the plan's kernels read planes (Capabilities::planes).
template <class Call>
constexpr auto planes_of_operands(std::string_view rows, std::string_view columns, std::string_view width) {
  return fields(optional("row_planes", &Call::row_planes, plane_lines(rows, width), Type::kFloat16),
                optional("column_planes", &Call::column_planes, plane_lines(columns, width), Type::kFloat16));
}
// The same for the operands of the second score.
template <class Call>
constexpr auto planes_of_other_operands(std::string_view rows, std::string_view columns,
                                        std::string_view width) {
  return fields(
      optional("other_row_planes", &Call::other_row_planes, plane_lines(rows, width), Type::kFloat16),
      optional("other_column_planes", &Call::other_column_planes, plane_lines(columns, width),
               Type::kFloat16));
}
// Sets the planes of a call's problem, if it has any.
template <class Call>
[[gnu::always_inline]] inline FoldProblem with_planes(const Call& x, FoldProblem p) {
  p.a_planes = planes_of_lines(x.row_planes, p.width());
  p.b_planes = planes_of_lines(x.column_planes, p.width());
  if constexpr (requires { x.other_row_planes; }) {
    p.other_a_planes = planes_of_lines(x.other_row_planes, p.other_width());
    p.other_b_planes = planes_of_lines(x.other_column_planes, p.other_width());
  }
  return p;
}

}  // namespace monoidreduce
