// Statistics that a user wrote as a Python function: a fold of a program over the rows of scale a b^T.
#pragma once

#include <string>

#include "monoidreduce/describe.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/matrix.h"

namespace monoidreduce {

// The operands of the second score, and the data of rows and columns: real numbers and integers; what the program gathers
// from, both too.
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

// A row's values: for each softmax its log-sum-exp and its means, then totals, then largest values. Its indices: the
// columns of the largest, then counts.
struct StatisticsForward {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView values, low, indices;  // low: of the log-sum-exps
  std::string program;              // the code of cpu/program.h
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

// The gradients by the operands. The program computes those by the scores; what it knows of the row, with the gradients
// of the values, is data of the row.
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

// The same on a GPU, by kernels that were compiled for the program (load_kernels): its fold, and on tensor cores the
// combination of partial states.
struct StatisticsFold {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView values, low, indices;
  TensorView scratch;                         // size: Plan::scratch
  std::int64_t kernels = 0, state_words = 0;  // the first kernel's; numbers of a state, 0: of a user's monoid
  double scale = 1;
};
template <std::same_as<StatisticsFold> X>
constexpr auto describe(const X*) {
  return pass("statistics_fold", kSimt | kSm80 | kSm90, statistics_operands<X>(),
              result("values", &X::values, "K N", Type::kAccumulation),
              result("low", &X::low, "L N", Type::kAccumulation),
              result("indices", &X::indices, "P N", Type::kInt64), scratch("scratch", &X::scratch),
              option("kernels", &X::kernels), option("state_words", &X::state_words),
              option("scale", &X::scale));
}

// The gradients by the scores, of some columns: those in b, from first_column on. On tensor cores in the element type, else
// in the accumulation type.
struct StatisticsLocalGradient {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView out, other_out;
  std::int64_t kernels = 0, first_column = 0;
  double scale = 1;
  std::int64_t workspace = 0;  // bytes for local gradients
};
template <std::same_as<StatisticsLocalGradient> X>
constexpr auto describe(const X*) {
  return pass("statistics_local_gradient", kSimt | kSm80 | kSm90, statistics_operands<X>(),
              result("out", &X::out, "N V", Type::kSameOrAccumulation).strided(),
              result("other_out", &X::other_out, "N V", Type::kSameOrAccumulation).strided().maybe(),
              option("kernels", &X::kernels), option("first_column", &X::first_column),
              option("scale", &X::scale), workspace(&X::workspace));
}

// Where threads own rows (Plan::narrow): the gradients of rows by their operands, and by their data that the program names.
// The gradients of columns are the same call with rows and columns exchanged. Each of Plan::parts parts of
// the columns has its own sum.
struct StatisticsRowGradient {
  TensorView a, b, other_a, other_b, row, column, row_index, column_index, table, table_index;
  TensorView d_a, d_other_a, sums;
  std::int64_t kernels = 0;
  double scale = 1;
  std::int64_t workspace = 0;  // bytes for the parts' sums
};
template <std::same_as<StatisticsRowGradient> X>
constexpr auto describe(const X*) {
  return pass("statistics_row_gradient", kSimt, statistics_operands<X>(),
              result("da", &X::d_a, "S N D", Type::kAccumulation).maybe(),
              result("dother_a", &X::d_other_a, "S N E", Type::kAccumulation).maybe(),
              result("sums", &X::sums, "S G N", Type::kAccumulation).maybe(), option("kernels", &X::kernels),
              option("scale", &X::scale), workspace(&X::workspace));
}

template <class Call>
[[gnu::always_inline]] inline FoldProblem statistics_problem(const Call& x) {
  return {.a = as_rows(x.a),
          .b = as_rows(x.b),
          .other_a = as_rows(x.other_a),
          .other_b = as_rows(x.other_b),
          .score = {.scale = x.scale}};
}

}  // namespace monoidreduce
