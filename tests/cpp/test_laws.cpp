// Tests that every monoid of the library obeys the laws (laws.h), in float and in double, and behaves as documented in edge
// cases.
#include "subjects.h"

namespace monoidreduce::test {
namespace {

static_assert(PayloadMonoid<LogSumExp<float>> && PayloadMonoid<Sum<double, Gelu>>);
static_assert(FramedMonoid<CrossEntropy<float>> && FramedMonoid<LogWSum<double>>);
static_assert(FramedMonoid<Distillation<float, DistillationLoss::kReverseKL>>);
static_assert(MaskableMonoid<LogSumExp<float>> && MonotoneMonoid<CrossEntropy<float>> &&
              MonotoneMonoid<LogWSum<double>>);
static_assert(TileMonoid<LogSumExp<float>> && TileMonoid<Sum<float>> && !MaskableMonoid<Sum<float>>);
static_assert(Monoid<WSum<float>> && !FramedMonoid<WSum<float>> && Monoid<ArgMax<double>> &&
              !FramedMonoid<ArgMax<double>>);

void check_both(const Subject& single, const Subject& twice, Checks& checks) {
  check_laws(single, checks);
  check_laws(twice, checks);
  check_precision(single, twice, checks);
}

template <class Activation>
void check_sum(const char* activation, Checks& checks) {
  check_both(sum<Sum<float, Activation>>(activation), sum<Sum<double, Activation>>(activation), checks);
}

template <DistillationLoss kLoss>
void check_distillation(const char* loss, Checks& checks) {
  check_both(distillation<Distillation<float, kLoss>>(loss), distillation<Distillation<double, kLoss>>(loss),
             checks);
}

template <class R>
Element<R> element(double score, int column = 0) {
  return {static_cast<R>(score), 0, column, -1};
}

template <class R>
void check_log_sum_exp_edges(Checks& checks) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const LogSumExp<R> m;
  checks.section(with_real<LogSumExp<R>>("LogSumExp"), "edges");
  CHECK(checks, same(numbers(m.lift(element<R>(-kInf))), numbers(m.identity())),
        numbers(m.lift(element<R>(-kInf))));
  CHECK(checks, same(numbers(m.project(m.identity())), {-kInf, 0.}), numbers(m.project(m.identity())));
  const auto two_empty = combine(m, m.lift(element<R>(-kInf)), m.identity());
  CHECK(checks, same(numbers(two_empty), numbers(m.identity())), numbers(two_empty));
  // A fold with scores of +inf is +inf, whatever their order, tile or number, beside finite scores and -inf. With a NaN it is
  // NaN.
  for (const std::vector<double>& scores :
       {Values{kInf}, Values{1, kInf}, Values{kInf, -kInf}, Values{3e38, kInf, 2}, Values{kInf, 5, kInf, -7},
        Values{kInf, NAN}, Values{NAN, 1, kInf}}) {
    const int count = static_cast<int>(scores.size());
    const double expected = any_nan(scores) ? NAN : kInf;
    auto folded = m.identity();
    for (const double score : scores) folded = combine(m, m.lift(element<R>(score)), folded);
    const auto tiled = fold_tile(m, m.identity(), count, [&](int c) { return element<R>(scores[c]); });
    const auto after = fold_tile(m, tiled, 2, [](int c) { return element<R>(c); });
    for (const auto& state : {folded, tiled, after, combine(m, tiled, folded)})
      CHECK(checks, same(numbers(m.project(state)), {expected, std::isnan(expected) ? NAN : 0.}),
            numbers(state));
  }
  // If the largest score is +inf, its softmax probability is NaN and that of the others is 0.
  const auto infinite = m.project(combine(m, m.lift(element<R>(1)), m.lift(element<R>(kInf))));
  CHECK(checks, m.share(element<R>(1), infinite) == 0 && std::isnan(m.share(element<R>(kInf), infinite)));
  // A NaN never becomes the frame of a tile, so the masses of the others stay finite, and only the sum is NaN.
  const auto with_nan = fold_tile(m, m.identity(), 3, [](int c) { return element<R>(c == 1 ? NAN : c); });
  CHECK(checks, with_nan.frame == 2 && std::isnan(with_nan.mass), numbers(with_nan));
  // Scores may be far apart, and far from 0.
  const auto spread = fold_tile(m, m.identity(), 3, [](int c) {
    return element<R>(c == 0 ? -3e4 : c == 1 ? 3e4 : 2e4);
  });
  CHECK(checks, same(numbers(m.project(spread)), {3e4, 0.}), numbers(m.project(spread)));
  // Two equal scores have a probability of 1/2 each, however large they are.
  for (const double score : {0., 600., -600., 3e4, 1e30}) {
    const auto pair = m.project(combine(m, m.lift(element<R>(score)), m.lift(element<R>(score))));
    const R half = m.share(element<R>(score), pair);
    CHECK(checks, near(half, 0.5, std::numeric_limits<R>::epsilon()), half, score, numbers(pair));
  }
}

template <class R>
void check_arg_max_edges(Checks& checks) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const ArgMax<R> m;
  checks.section(with_real<ArgMax<R>>("ArgMax"), "edges");
  const auto of = [&](std::vector<double> scores) {
    const int count = static_cast<int>(scores.size());
    const auto upwards =
        m.project(fold_tile(m, m.identity(), count, [&](int c) { return element<R>(scores[c], c); }));
    const auto downwards = m.project(fold_tile(
        m, m.identity(), count, [&](int c) { return element<R>(scores[count - 1 - c], count - 1 - c); }));
    CHECK(checks, same(numbers(upwards), numbers(downwards)), numbers(upwards), numbers(downwards));
    return upwards;
  };
  const auto is = [&](typename ArgMax<R>::Output p, double value, int column) {
    return same(numbers(p), {value, static_cast<double>(column)});
  };
  CHECK(checks, is(of({}), -kInf, -1), numbers(of({})));
  CHECK(checks, is(of({-kInf}), -kInf, 0), numbers(of({-kInf})));
  CHECK(checks, is(of({-kInf, -kInf}), -kInf, 0), numbers(of({-kInf, -kInf})));
  CHECK(checks, is(of({1, 5, 3, 5}), 5, 1), numbers(of({1, 5, 3, 5})));
  CHECK(checks, is(of({-0., 0.}), -0., 0), numbers(of({-0., 0.})));
  CHECK(checks, is(of({0., -0.}), 0., 0), numbers(of({0., -0.})));
  CHECK(checks, is(of({1, NAN, kInf, NAN}), NAN, 1), numbers(of({1, NAN, kInf, NAN})));
  CHECK(checks, is(of({kInf, 1, kInf}), kInf, 0), numbers(of({kInf, 1, kInf})));
  // The gradient goes only to the chosen column; an empty row has none.
  const auto p = of({1, 5, 5});
  CHECK(checks, m.local_gradient(element<R>(5, 1), p, R(-2)).score == -2);
  CHECK(checks, m.local_gradient(element<R>(5, 2), p, R(-2)).score == 0);
  CHECK(checks, m.local_gradient(element<R>(5, 0), of({}), R(-2)).score == 0);
}

// A label that is not among the columns selects nothing, and every column's score is in the sum.
template <class R>
void check_cross_entropy_edges(Checks& checks) {
  const CrossEntropy<R> m;
  checks.section(with_real<CrossEntropy<R>>("CrossEntropy"), "edges");
  const auto empty = m.project(m.identity());
  CHECK(checks, same(numbers(empty), {-std::numeric_limits<double>::infinity(), 0., -0., 0., 0., 0.}),
        numbers(empty));
  for (const int label : {-100, -1, 3, 1000}) {
    const auto p =
        m.project(fold_tile(m, m.identity(), 3, [&](int c) { return Element<R>{R(c + 1), 0, c, label}; }));
    CHECK(checks, p.target == 0 && near(p.mean.high, 2, 1e-6) && p.count == 3, numbers(p), label);
  }
}

template <class R>
void check_log_probs_edges(Checks& checks) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const TopLogProbs<R> m;
  checks.section(with_real<TopLogProbs<R>>("TopLogProbs"), "edges");
  const auto of = [&](std::vector<double> scores, double factor = 1) {
    const int count = static_cast<int>(scores.size());
    const auto at = [&](int c) { return Element<R>{R(scores[c]), 0, c, -1, R(factor)}; };
    auto backwards = m.identity();
    for (int c = count - 1; c >= 0; --c) backwards = combine(m, m.lift(at(c)), backwards);
    const auto tiled = m.project(fold_tile(m, m.identity(), count, at)), p = m.project(backwards);
    CHECK(checks, p.top == tiled.top && near(numbers(p), numbers(tiled), 1e-6), numbers(p), numbers(tiled));
    return tiled;
  };
  // lse, entropy and the column of the largest score.
  const auto is = [&](typename TopLogProbs<R>::Output p, double lse, double entropy, int top) {
    return near({p.lse.high, p.entropy}, {lse, entropy}, 2e-5) && p.top == top;
  };
  CHECK(checks, is(of({}), -kInf, 0, -1), numbers(of({})));
  CHECK(checks, is(of({-kInf, -kInf}), -kInf, 0, 0), numbers(of({-kInf, -kInf})));
  CHECK(checks, is(of({7}), 7, 0, 0), numbers(of({7})));
  CHECK(checks, is(of({-kInf, 5, 300, 300}), 300 + std::log(2), std::log(2), 2),
        numbers(of({-kInf, 5, 300, 300})));
  CHECK(checks, is(of({1e6, 1e6, -1e6}, 1e-6), 1 + std::log(2 + std::exp(-2)), 0.88538155, 0),
        numbers(of({1e6, 1e6, -1e6}, 1e-6)));
  CHECK(checks, is(of({1, kInf, 2}), kInf, NAN, 1), numbers(of({1, kInf, 2})));
  CHECK(checks, is(of({1, NAN, 2}), NAN, NAN, -1), numbers(of({1, NAN, 2})));
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  using namespace monoidreduce;
  using namespace monoidreduce::test;
  Checks checks;
  check_both(log_sum_exp<LogSumExp<float>>(), log_sum_exp<LogSumExp<double>>(), checks);
  check_sum<Identity>("Identity", checks);
  check_sum<Relu>("Relu", checks);
  check_sum<Relu2>("Relu2", checks);
  check_sum<Sigmoid>("Sigmoid", checks);
  check_sum<Silu>("Silu", checks);
  check_sum<Tanh>("Tanh", checks);
  check_sum<Gelu>("Gelu", checks);
  check_sum<GeluTanh>("GeluTanh", checks);
  check_both(cross_entropy<CrossEntropy<float>>(), cross_entropy<CrossEntropy<double>>(), checks);
  check_both(weighted_cross_entropy<WeightedCrossEntropy<float>>(),
             weighted_cross_entropy<WeightedCrossEntropy<double>>(), checks);
  check_both(log_probs<LogProbs<float>>("LogProbs"), log_probs<LogProbs<double>>("LogProbs"), checks);
  check_both(log_probs<TopLogProbs<float>>("TopLogProbs"), log_probs<TopLogProbs<double>>("TopLogProbs"),
             checks);
  check_distillation<DistillationLoss::kCrossEntropy>("cross entropy", checks);
  check_distillation<DistillationLoss::kForwardKL>("forward KL", checks);
  check_distillation<DistillationLoss::kReverseKL>("reverse KL", checks);
  check_both(weighted_sum<WSum<float>>(), weighted_sum<WSum<double>>(), checks);
  check_both(log_weighted_sum<LogWSum<float>>(), log_weighted_sum<LogWSum<double>>(), checks);
  check_both(arg_max<ArgMax<float>>(), arg_max<ArgMax<double>>(), checks);
  check_log_sum_exp_edges<float>(checks);
  check_log_sum_exp_edges<double>(checks);
  check_arg_max_edges<float>(checks);
  check_arg_max_edges<double>(checks);
  check_cross_entropy_edges<float>(checks);
  check_cross_entropy_edges<double>(checks);
  check_log_probs_edges<float>(checks);
  check_log_probs_edges<double>(checks);
  return checks.finish();
}
