// Parts of the losses' passes: an order of rows, matrix products of dlogits (local gradients), and the reduction of the losses.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/matrix.h"
#include "monoidreduce/rows.h"

namespace monoidreduce {

// An order of rows: the indices of the active rows (not ignored, not masked), then of the others, and last the number of active
// rows.
constexpr Axis places_of(std::string_view rows) {
  return {.name = "N + 1", .of = rows, .follows = [](std::int64_t n) { return n + 1; }};
}
template <class Call>
constexpr TensorField<Call> order_of(TensorView Call::* member, std::string_view rows) {
  return optional("order", member, {places_of(rows)}, Type::kInt64).dense();
}

// Finds the active rows by stable compaction, for kernels that skip the others. With an upstream gradient of a sum or a mean of
// losses it also writes the factor of each row, which is the same for all: unit * upstream, for a mean divided by the number of
// active rows, but at least by 1.
struct RowOrdering {
  TensorView target, mask;  // as in LossReduction; one of the two
  TensorView order;
  TensorView upstream{}, factors{};  // both or neither
  std::int64_t ignore_index = -100;
  double unit = 1;
  bool mean = false;
};
template <class Call>  // RowOrdering, RowClearing
void check_active_rows(const Call& x) {
  require(x.target.present() != x.mask.present(), "target, mask: expected one of them, got both or neither");
  require(x.upstream.present() == x.factors.present(), "upstream, factors: expected both or neither");
}
inline void check_ordered(const RowOrdering& x) {
  check_active_rows(x);
  const TensorView& active = x.target.present() ? x.target : x.mask;
  require(active.size[0] + 1 == x.order.size[0], "order: expected a place for each row and one more, got ",
          x.order.size[0]);
}
template <std::same_as<RowOrdering> X>
constexpr auto describe(const X*) {
  return helper("order_rows", kGpus, result("order", &X::order, {places_of("N")}, Type::kInt64),
                optional("target", &X::target, "N", Type::kInt64),
                optional("mask", &X::mask, "N", Type::kBool),
                optional("upstream", &X::upstream, "values=1", Type::kFloat32),
                result("factors", &X::factors, "N", Type::kFloat32).maybe().where(&check_ordered),
                option("ignore_index", &X::ignore_index), option("unit", &X::unit), option("mean", &X::mean));
}

// For calls that compute all rows instead of gathering the active ones (Plan::skips_rows is false). Copies x to out and sets inactive
// rows to 0, even if they hold NaN: out_i = x_i, or 0 if row i is inactive. If there is an upstream gradient, it also writes factors:
// as a RowOrdering does, but 0 for inactive rows. The last one is the factor of a sum over rows, 0 if no row is active. Rows are dense
// and 16-byte aligned.
struct RowClearing {
  TensorView target, mask;  // as in LossReduction; one of the two
  TensorView x, out;
  TensorView upstream{}, factors{};  // both or neither
  std::int64_t ignore_index = -100;
  double unit = 1;
  bool mean = false;
};
inline void check_cleared(const RowClearing& x) {
  check_active_rows(x);
  require(x.x.size[1] * item_size(x.x.dtype) % 16 == 0, "x: expected rows of a multiple of 16 bytes, got ",
          x.x.size[1], " elements");
}
template <std::same_as<RowClearing> X>
constexpr auto describe(const X*) {
  return helper(
      "clear_rows", kGpus, tensor("x", &X::x, "N D"), result("out", &X::out, "N D").strided(),
      optional("target", &X::target, "N", Type::kInt64), optional("mask", &X::mask, "N", Type::kBool),
      optional("upstream", &X::upstream, "values=1", Type::kFloat32),
      result("factors", &X::factors, {places_of("N")}, Type::kFloat32).maybe().where(&check_cleared),
      option("ignore_index", &X::ignore_index), option("unit", &X::unit), option("mean", &X::mean));
}

// out_i = factor_i x_i, and 0 if factor_i is 0 or row i is not active, even if row i holds NaN. On CUDA, for float and 16-bit
// types. Rows are dense and 16-byte aligned.
//
// With an order, rows of x are gathered; if scatters is true, rows of out are scattered instead. Without a factor, that of
// active rows is 1. out may hold only the places from first_place on.
struct RowScaling {
  TensorView x, out;
  TensorView factor;  // in the order of `order`
  TensorView order;
  bool scatters = false;
  std::int64_t first_place = 0;
};
inline void check_scaled(const RowScaling& x) {
  require(x.x.dtype != DType::kFloat64, "x: expected float32 or a 16-bit type, got float64");
  require(x.x.size[1] % 8 == 0, "x: expected a width that is a multiple of 8, got ", x.x.size[1]);
}
inline void check_order(const RowScaling& x) {
  require(x.order.present() || (x.factor.present() && !x.scatters), "order: expected a tensor, got none");
}
template <std::same_as<RowScaling> X>
constexpr auto describe(const X*) {
  return helper("scale_rows", kGpus, tensor("x", &X::x, "P D").where(&check_scaled),
                optional("factor", &X::factor, "P", Type::kFloat32).dense(),
                result("out", &X::out, "P D", Type::kUpToFloat32).strided(),
                order_of(&X::order, "P").where(&check_order), option("scatters", &X::scatters));
}

// Copies x into out. The last two axes of out may have other sizes: x is cut, or padded with zeros. On CUDA, for float and
// 16-bit types; floats may be rounded to out's type.
struct FittedCopy {
  TensorView x, out;
};
inline void check_fitted(const FittedCopy& x) {
  require(x.x.dtype != DType::kFloat64, "x: expected float32 or a 16-bit type, got float64");
  require(x.out.dtype == x.x.dtype || x.x.dtype == DType::kFloat32, "out: expected ", name(x.x.dtype),
          ", got ", name(x.out.dtype));
}
template <std::same_as<FittedCopy> X>
constexpr auto describe(const X*) {
  return helper("copy_fitted", kGpus, tensor("x", &X::x, "B H R C").where(&check_fitted),
                result("out", &X::out, "B H S D", Type::kUpToFloat32).strided());
}

template <class Call>
void check_16_bits(const Call& x) {
  require(item_size(x.a.dtype) == 2, "a: expected a 16-bit type, got ", name(x.a.dtype));
}

// out = factor a b, where a holds dlogits. The rows of a are in an order, active ones first. The other rows of a are 0 up to
// the next multiple of 64, and not read beyond it. Tensors have the 16-bit type of a unless said otherwise, and their lines
// are 16-byte aligned.
//
// adds: adds to out, which is float. Otherwise place i writes row order[i] of out, with 0 if that row is not active.
struct RowsProduct {
  TensorView a, b, out;
  TensorView factor;  // one number for each row of the product
  TensorView order;   // absent: all rows are active
  bool adds = false;
};
inline void check_sum(const RowsProduct& x) {
  require(!x.adds || x.out.dtype == DType::kFloat32, "out: expected float32, which can be added to, got ",
          name(x.out.dtype));
}
template <std::same_as<RowsProduct> X>
constexpr auto describe(const X*) {
  return helper("rows_product", kSm90, tensor("a", &X::a, "P C").where(&check_16_bits<X>),
                tensor("b", &X::b, "C D"), optional("factor", &X::factor, "P", Type::kAccumulation).dense(),
                result("out", &X::out, "P D", Type::kSameOrAccumulation).strided().where(&check_sum),
                order_of(&X::order, "P"), option("adds", &X::adds));
}

// out = scale a^T b, summed over the active rows. A float out is added to, a 16-bit one is written.
struct ColumnsProduct {
  TensorView a, b;
  TensorView scale;  // one number, on the device
  TensorView out, order;
};
template <std::same_as<ColumnsProduct> X>
constexpr auto describe(const X*) {
  return helper("columns_product", kSm90, tensor("a", &X::a, "P C").where(&check_16_bits<X>),
                tensor("b", &X::b, "P D"), optional("scale", &X::scale, "1=1", Type::kAccumulation).dense(),
                result("out", &X::out, "C D", Type::kSameOrAccumulation).strided(), order_of(&X::order, "P"));
}

// A matrix product as the scores of a problem; the width is the dimension that is summed over.
inline FoldProblem product_problem(const TensorView& a, const TensorView& b, const TensorView& order) {
  return {.a = as_rows(a), .b = as_rows(b), .order = order};
}
inline FoldProblem product_problem(const RowsProduct& x) {
  return product_problem(x.a, transposed(x.b), x.order);
}
inline FoldProblem product_problem(const ColumnsProduct& x) {
  return product_problem(transposed(x.a), transposed(x.b), x.order);
}

// Reduces the tokens' losses to their sum, or to their mean over the active tokens (0 if no token is active).
struct LossReduction {
  TensorView losses;        // 0 for tokens that are not active
  TensorView target, mask;  // a token is active if its target is not ignore_index, or its mask is true
  TensorView reduced;
  std::int64_t ignore_index = -100;
  bool mean = false;
};
template <std::same_as<LossReduction> X>
constexpr auto describe(const X*) {
  return helper("reduce_losses", kCpu | kGpus, tensor("losses", &X::losses, "N", Type::kAccumulation).dense(),
                optional("target", &X::target, "N", Type::kInt64),
                optional("mask", &X::mask, "N", Type::kBool),
                result("reduced", &X::reduced, "values=1", Type::kAccumulation),
                option("ignore_index", &X::ignore_index), option("mean", &X::mean));
}

// Says which tokens are active, that is, counted by a mean of losses.
class ActiveTokens {
 public:
  template <class Arguments>  // LossReduction, RowOrdering, RowClearing
  explicit ActiveTokens(const Arguments& x)
      : target_{static_cast<const std::int64_t*>(x.target.data), x.target.stride[0]},
        mask_{static_cast<const bool*>(x.mask.data), x.mask.stride[0]},
        ignore_index_(x.ignore_index) {}

  MR_HD bool operator()(std::int64_t token) const {
    return (!target_.data || target_[token] != ignore_index_) && (!mask_.data || mask_[token]);
  }

 private:
  RowVector<const std::int64_t> target_;
  RowVector<const bool> mask_;
  std::int64_t ignore_index_;
};

}  // namespace monoidreduce
