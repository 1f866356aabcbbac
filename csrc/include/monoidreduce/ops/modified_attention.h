// Attention with a user's score_mod and mask_mod, traced to a program (monoidreduce/folds/program/mods.py).
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/attention.h"

namespace monoidreduce {

template <class Call>
void check_softmax(const Call& x) {
  require(!x.sinks.present() || !x.options.weights, "sinks: expected none beside weights, got a tensor");
}
// table, table_index: the real numbers and integers that the program gathers from. blocks: the block mask; 0 for a block of
// rows and columns that is entirely masked, any other number otherwise, on a GPU a BlockWord
// (device/program/score_element.h). row_spans, column_spans: as for attention.
template <class Call>
constexpr auto modified_operands() {
  return fields(
      tensor("q", &Call::q, "B H M F"), tensor("k", &Call::k, "B Hkv N F").where(&check_heads<Call>),
      tensor("v", &Call::v, "B Hkv N D"), optional("table", &Call::table, "T", Type::kAccumulation).dense(),
      optional("table_index", &Call::table_index, "I", Type::kInt64).dense(),
      optional("blocks", &Call::blocks, "B H Mb Nb", Type::kInt64),
      sink_operand<Call>().where(&check_softmax<Call>));
}

struct ModifiedOptions {
  double scale = 1;
  std::int64_t left = ColumnRange::kUnbounded,
               right = ColumnRange::kUnbounded;    // the window, see ColumnRange
  std::int64_t block_rows = 1, block_columns = 1;  // the size of a block of the block mask
  bool weights = false;  // the program returns weights, not scores: out = weights v, without softmax and lse
};
template <std::same_as<ModifiedOptions> X>
constexpr auto describe(const X*) {
  constexpr auto is_bound = [](std::int64_t n) { return n >= ColumnRange::kUnbounded; };
  constexpr auto is_size = [](std::int64_t n) { return n > 0; };
  constexpr const char* kBound = "an integer >= 0, or -1 for no bound";
  return fields(option("scale", &X::scale), option("left", &X::left, kBound, is_bound),
                option("right", &X::right, kBound, is_bound),
                option("block_rows", &X::block_rows, "an integer > 0", is_size),
                option("block_columns", &X::block_columns, "an integer > 0", is_size),
                option("weights", &X::weights));
}
template <class Call>
void check_blocks(const Call& x) {
  const auto counts = [](std::int64_t size, std::int64_t of) { return (size + of - 1) / of; };
  if (!x.blocks.present()) return;
  require(x.blocks.size[2] == counts(x.q.size[2], x.options.block_rows) &&
              x.blocks.size[3] == counts(x.k.size[2], x.options.block_columns),
          "blocks: expected one for each ", x.options.block_rows, " rows and ", x.options.block_columns,
          " columns, got ", x.blocks.size[2], " and ", x.blocks.size[3]);
}

// The program: text for the CPU's interpreter (cpu/program.h), or on a GPU the handle of a kernel that was compiled for it
// (load_kernels).
using ProgramCode = std::variant<std::string, std::int64_t>;

// Checks the program of a call, and that a GPU's kernels get all tensors that they read or write in any case.
template <class Call>
void check_program(const Call& x) {
  check_blocks(x);
  if (!x.q.is_cuda()) {
    require(std::holds_alternative<std::string>(x.program),
            "program: expected its text on the CPU, got a kernel");
    if constexpr (requires { x.d_table; })
      require(!x.d_table.present(), "d_table: expected none on the CPU, got a tensor");
    return;
  }
  require(std::holds_alternative<std::int64_t>(x.program), "program: expected a kernel on a GPU, got text");
  const auto expect = [](const char* name, const TensorView& t) {
    require(t.present(), name, ": expected a tensor, got none");
  };
  if constexpr (requires { x.grad_out; }) expect("grad_out", x.grad_out);
  expect("lse", x.lse), expect("lse_low", x.lse_low);
}

// sizes: the sizes of the tables that the program gathers from. The text of a program has them in it.
struct ModifiedAttentionForward {
  TensorView q, k, v, table, table_index, blocks, sinks, row_spans, column_spans, out, lse, lse_low, out_low;
  TensorView scratch;  // 16-byte aligned; size: Plan::scratch
  ProgramCode program;
  std::vector<std::int64_t> sizes;
  ModifiedOptions options;
};
template <std::same_as<ModifiedAttentionForward> X>
constexpr auto describe(const X*) {
  return pass("modified_attention_forward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, modified_operands<X>(),
              span_operands<X>(), result("out", &X::out, "B H M D"),
              result("lse", &X::lse, "B H M", Type::kAccumulation).maybe(),
              result("lse_low", &X::lse_low, "B H M", Type::kAccumulation).maybe(),
              result("out_low", &X::out_low, "B H M D").maybe().where(&check_low_word<X>),
              scratch("scratch", &X::scratch), option("program", &X::program).where(&check_program<X>),
              option("sizes", &X::sizes), options(&X::options));
}

// d_table: on a GPU alone, for a kernel that was compiled for it: TableSum (device/program/score_element.h) says what the
// kernel does with it, and whether it takes table_integers too.
struct ModifiedAttentionBackward {
  TensorView grad_out, grad_lse, q, k, v, table, table_index, blocks, sinks, row_spans, column_spans;
  TensorView out, lse, lse_low, out_low;
  TensorView d_q, d_k, d_v, d_table, table_integers, d_sinks;
  TensorView scratch;  // size: Plan::scratch
  ProgramCode program;
  std::vector<std::int64_t> sizes;
  ModifiedOptions options;
};
template <std::same_as<ModifiedAttentionBackward> X>
constexpr auto describe(const X*) {
  return pass("modified_attention_backward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, modified_operands<X>(),
              span_operands<X>(), optional("grad_out", &X::grad_out, "B H M D"),
              optional("grad_lse", &X::grad_lse, "B H M", Type::kAccumulation),
              tensor("out", &X::out, "B H M O").where(&check_output_width<X>),
              optional("lse", &X::lse, "B H M", Type::kAccumulation).dense(),
              optional("lse_low", &X::lse_low, "B H M", Type::kAccumulation).dense(),
              optional("out_low", &X::out_low, "B H M O").where(&check_low_word<X>),
              gradient("dq", &X::d_q, "B H M F"), gradient("dk", &X::d_k, "B Hkv N F", Type::kPlanGradient),
              gradient("dv", &X::d_v, "B Hkv N D", Type::kPlanGradient),
              result("d_table", &X::d_table, "T", Type::kAccumulation).maybe(),
              result("table_integers", &X::table_integers, "T", Type::kInt64).maybe(),
              sink_gradient_result<X>(), scratch("scratch", &X::scratch),
              option("program", &X::program).where(&check_program<X>), option("sizes", &X::sizes),
              options(&X::options));
}

// The scores of this problem are bare dot products: the program scales them.
template <class Call>
[[gnu::always_inline]] inline FoldProblem modified_problem(const Call& x) {
  return {.a = x.q, .b = x.k, .payload = x.v, .range = key_range(x)};
}
// Whether all tiles of queries have equally many unmasked keys, as far as the host knows: there is neither a block mask nor a
// window. (What mask_mod masks is unknown to the host.)
template <class Call>
bool is_even(const Call& x) {
  return !x.blocks.present() && key_range(x).all();
}

// Whether the functions leave few registers for a tile of the backward kernel: those of packed sequences, which gather
// positions, and those that sum the gradient of tables.
inline bool takes_lean_tile(const ModifiedAttentionBackward& x) {
  return x.row_spans.present() || x.d_table.present();
}

}  // namespace monoidreduce
