// Distillation with the loss "jsd" (Jensen-Shannon divergence) stores scores, in float32, for some rows or some classes at a
// time. This file has the product that makes them, and what is computed from them between the matrix products.
#pragma once

#include <cmath>

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/ops/matrix.h"

namespace monoidreduce {

// out = a b^T in float32, on GPUs with Capabilities::multiplies. Lines of out are on 16-byte boundaries.
struct ScoreProduct {
  TensorView a, b, out;
};
inline void check_bfloat16(const ScoreProduct& x) {
  require(x.a.dtype == DType::kBFloat16, "a: expected bfloat16, got ", name(x.a.dtype));
}
template <std::same_as<ScoreProduct> X>
constexpr auto describe(const X*) {
  return helper("score_product", kSm90, tensor("a", &X::a, "N D").where(&check_bfloat16),
                tensor("b", &X::b, "V D"), result("out", &X::out, "N V", Type::kFloat32).strided());
}
inline FoldProblem product_problem(const ScoreProduct& x) { return {.a = as_rows(x.a), .b = as_rows(x.b)}; }

// Scores [rows, classes] of the student and of the teacher, at temperature 1. Lines are padded to a multiple of 8 elements; the
// padding may hold anything.
template <class Call>
void check_scores(const Call& x) {
  for (const TensorView* t : {&x.student, &x.teacher}) {
    const char* const name = t == &x.student ? "student" : "teacher";
    require(t->dtype == DType::kFloat32, name, ": expected float32, got ", monoidreduce::name(t->dtype));
    const bool padded = t->size[0] <= 1 || (t->stride[0] % 8 == 0 && t->stride[0] >= t->size[1]);
    require(t->size[1] <= 1 || t->stride[1] == 1, name, ": expected adjacent scores, got stride ",
            t->stride[1]);
    require(padded && reinterpret_cast<std::uintptr_t>(t->data) % 32 == 0, name,
            ": expected lines padded to a multiple of 8 elements, on 32-byte boundaries, got stride ",
            t->stride[0]);
  }
}
template <class Call>
constexpr auto stored_scores() {
  return fields(result("student", &Call::student, "N V").strided(),
                result("teacher", &Call::teacher, "N V").strided().where(&check_scores<Call>),
                optional("mask", &Call::mask, "N", Type::kBool));
}
template <class Call>
constexpr auto jsd_options() {
  return fields(
      option("inverse", &Call::inverse, "1 / temperature, a finite number > 0",
             [](double v) { return v > 0 && std::isfinite(v); }),
      option("beta", &Call::beta, "a number between 0 and 1", [](double v) { return v > 0 && v < 1; }));
}

// For whole rows: the losses, and the statistics of a row that JsdGradient needs. With p the student's and q the teacher's
// distribution, the loss is beta KL(q | m) + (1 - beta) KL(p | m), where m = beta q + (1 - beta) p. Rows that the mask
// excludes have loss 0 and are not read. If `factor` is present, the call also does what JsdGradient does.
struct JsdRows {
  TensorView student, teacher, mask, loss;
  TensorView stats;   // JsdRow (device/simt/jsd_rows.cuh)
  TensorView factor;  // absent: no gradients
  double inverse = 1, beta = .5;
};
template <std::same_as<JsdRows> X>
constexpr auto describe(const X*) {
  return helper("jsd_rows", kSm90, stored_scores<X>(), result("loss", &X::loss, "N"),
                result("stats", &X::stats, "N statistics=5"),
                optional("factor", &X::factor, "values=1").dense(), jsd_options<X>());
}

// The dlogits: the derivatives of the losses with respect to the student's scores, times `factor`, for any of the classes of
// these rows. They replace the scores in `student`: the first half of a line becomes as many bfloat16 elements as the line had
// scores. Rows that the mask excludes are 0.
struct JsdGradient {
  TensorView student, teacher, mask, stats, factor;
  double inverse = 1, beta = .5;
};
template <std::same_as<JsdGradient> X>
constexpr auto describe(const X*) {
  return helper("jsd_gradient", kSm90, stored_scores<X>(),
                tensor("stats", &X::stats, "N statistics=5").dense(),
                tensor("factor", &X::factor, "values=1").dense(), jsd_options<X>());
}

}  // namespace monoidreduce
