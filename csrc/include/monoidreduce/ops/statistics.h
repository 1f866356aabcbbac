// Statistics of rows that a user wrote as a Python function, traced to a program: a fold over each row of scale a b^T.
#pragma once

#include <string>

#include "monoidreduce/describe.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/matrix.h"
#include "monoidreduce/ops/planes.h"

namespace monoidreduce {

// other_a, other_b: operands of the second score. row, column, row_index, column_index: the user's data for each row and
// column, real numbers and integers. table, table_index: the real numbers and integers that the program gathers from.
template <class Call>
constexpr auto statistics_operands() {
  return fields(tensor("a", &Call::a, "N D"), tensor("b", &Call::b, "V D"),
                optional("other_a", &Call::other_a, "N E"), optional("other_b", &Call::other_b, "V E"),
                optional("row", &Call::row, "R N", Type::kAccumulation),
                optional("column", &Call::column, "C V", Type::kAccumulation),
                optional("row_index", &Call::row_index, "I N", Type::kInt64),
                optional("column_index", &Call::column_index, "J V", Type::kInt64),
                optional("table", &Call::table, "T", Type::kAccumulation).dense(),
                optional("table_index", &Call::table_index, "U", Type::kInt64).dense());
}

// values of a row: for each softmax its log-sum-exp and its means, then totals, then largest values. indices of a row: the
// columns of the largest values, then counts.
struct StatisticsForward {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView values, low, indices;  // low: the low words of the log-sum-exps
  std::string program;              // code for the interpreter, cpu/program.h
  double scale = 1;
};
template <std::same_as<StatisticsForward> X>
constexpr auto describe(const X*) {
  return pass("statistics_forward", kCpu, statistics_operands<X>(),
              result("values", &X::values, "K N", Type::kAccumulation),
              result("low", &X::low, "L N", Type::kAccumulation),
              result("indices", &X::indices, "P N", Type::kInt64), option("program", &X::program),
              option("scale", &X::scale));
}

// The gradients of the operands. Here the program computes the derivative with respect to each score. The row's statistics and
// upstream gradients, which it needs, are passed as data of the row.
struct StatisticsBackward {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView d_a, d_b, d_other_a, d_other_b;
  std::string program;
  double scale = 1;
};
template <std::same_as<StatisticsBackward> X>
constexpr auto describe(const X*) {
  return pass("statistics_backward", kCpu, statistics_operands<X>(), gradient("da", &X::d_a, "N D"),
              gradient("db", &X::d_b, "V D"), gradient("dother_a", &X::d_other_a, "N E"),
              gradient("dother_b", &X::d_other_b, "V E"), option("program", &X::program),
              option("scale", &X::scale));
}

// The same on a GPU, by kernels that were compiled for the program (load_kernels): the fold, and one that combines partial
// states.
struct StatisticsFold {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView values, low, indices;
  TensorView scratch;  // size: Plan::scratch
  TensorView row_planes, column_planes, other_row_planes,
      other_column_planes;  // of a and b, of other_a and other_b
  // kernels: handle of the first kernel. state_words: how many numbers a state has; 0 for a user's monoid in C++. finds_most:
  // the kernels also find the k largest values of each row (launch/most_sizes.h); not those for SIMT.
  std::int64_t kernels = 0, state_words = 0;
  bool finds_most = false;
  double scale = 1;
};
template <std::same_as<StatisticsFold> X>
constexpr auto describe(const X*) {
  return pass("statistics_fold", kSimt | kSm80 | kSm90 | kPlanes, statistics_operands<X>(),
              result("values", &X::values, "K N", Type::kAccumulation),
              result("low", &X::low, "L N", Type::kAccumulation),
              result("indices", &X::indices, "P N", Type::kInt64), scratch("scratch", &X::scratch),
              planes_of_operands<X>("N", "V", "D"), planes_of_other_operands<X>("N", "V", "E"),
              option("kernels", &X::kernels), option("state_words", &X::state_words),
              option("finds_most", &X::finds_most), option("scale", &X::scale));
}

// The same on Hopper for a program with payload sums, or for several batches: in one pass all statistics, and some of the payload
// sums' slabs, which have 64 columns (Plan::payload_slabs). The slabs of one sum are adjacent. The payload has the vectors of all
// sums side by side. Where each sum has several vectors of a column, the first vectors of all sums come first, then the second
// vectors of all sums. The call of slab 0 also writes the statistics.
// batches: a has the rows of so many folds, and b their columns, one fold after another.
struct StatisticsPayload {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView payload;
  TensorView wanted;  // the call does nothing if this number is 0
  TensorView values, low, indices, sums;
  std::int64_t kernels = 0;  // handle of the kernel for these slabs
  std::int64_t batches = 1, first_slab = 0;
  double scale = 1;
};
template <std::same_as<StatisticsPayload> X>
constexpr auto describe(const X*) {
  return part<StatisticsFold>(
      "statistics_payload", kSm90, statistics_operands<X>(), optional("payload", &X::payload, "V W"),
      optional("wanted", &X::wanted, "one=1", Type::kInt64),
      result("values", &X::values, "K N", Type::kAccumulation),
      result("low", &X::low, "L N", Type::kAccumulation), result("indices", &X::indices, "P N", Type::kInt64),
      result("sums", &X::sums, "N S", Type::kAccumulation), option("kernels", &X::kernels),
      option("batches", &X::batches, "at least 1", [](std::int64_t count) { return count >= 1; }),
      option("first_slab", &X::first_slab), option("scale", &X::scale));
}

// The derivatives of the loss with respect to the scores, for the columns in b, which are those from first_column on. On tensor
// cores they are in the element type, otherwise in the accumulation type.
struct StatisticsLocalGradient {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView out, other_out;
  TensorView row_planes, column_planes, other_row_planes, other_column_planes;  // as in StatisticsFold
  std::int64_t kernels = 0, first_column = 0;
  double scale = 1;
  std::int64_t workspace = 0;  // bytes for these derivatives
};
template <std::same_as<StatisticsLocalGradient> X>
constexpr auto describe(const X*) {
  return pass("statistics_local_gradient", kSimt | kSm80 | kSm90 | kPlanes, statistics_operands<X>(),
              result("out", &X::out, "N V", Type::kSameOrAccumulation).strided(),
              result("other_out", &X::other_out, "N V", Type::kSameOrAccumulation).strided().maybe(),
              planes_of_operands<X>("N", "V", "D"), planes_of_other_operands<X>("N", "V", "E"),
              option("kernels", &X::kernels), option("first_column", &X::first_column),
              option("scale", &X::scale), workspace(&X::workspace));
}

// For narrow programs, in which threads, or in planes blocks, own rows (Plan::owned_rows): the gradients of the rows' operands
// (d_a, d_other_a) and of those of the rows' data that the program names (sums). The same call with rows and columns exchanged
// gives the gradients of the columns. S is OwnedRows::splits: each part of the columns has its own sum, and the caller adds them.
// In planes there is one score.
struct StatisticsRowGradient {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView d_a, d_other_a, sums;
  TensorView row_planes, column_planes;  // of a and b
  std::int64_t kernels = 0;
  double scale = 1;
  std::int64_t workspace = 0;  // bytes for the parts' sums
};
template <std::same_as<StatisticsRowGradient> X>
constexpr auto describe(const X*) {
  return pass("statistics_row_gradient", kSimt | kPlanes, statistics_operands<X>(),
              result("da", &X::d_a, "S N D", Type::kAccumulation).maybe(),
              result("dother_a", &X::d_other_a, "S N E", Type::kAccumulation).maybe(),
              result("sums", &X::sums, "S G N", Type::kAccumulation).maybe(),
              planes_of_operands<X>("N", "V", "D"), option("kernels", &X::kernels),
              option("scale", &X::scale), workspace(&X::workspace));
}

template <class Call>
[[gnu::always_inline]] inline FoldProblem statistics_problem(const Call& x) {
  const FoldProblem p{.a = as_rows(x.a),
                      .b = as_rows(x.b),
                      .other_a = as_rows(x.other_a),
                      .other_b = as_rows(x.other_b),
                      .score = {.scale = x.scale}};
  if constexpr (requires { x.row_planes; }) return with_planes(x, p);
  return p;
}

}  // namespace monoidreduce
