// Tests what the monoids compute: their outputs against the formulas that they implement, in long double, and the functions of
// rows that use them.
#include <algorithm>
#include <cmath>

#include "monoidreduce/ops/cross_entropy.h"
#include "monoidreduce/rows.h"
#include "subjects.h"

namespace monoidreduce::test {
namespace {

using Real80 = long double;

Real80 log_sum_exp_of(const Row& row, double Item::* score) {
  Real80 most = -std::numeric_limits<Real80>::infinity(), sum = 0;
  for (const Item& e : row) most = std::max<Real80>(most, e.*score);
  for (const Item& e : row) sum += expl(e.*score - most);
  return row.empty() ? most : most + logl(sum);
}
// sum_j softmax(score)_j f(e_j)
template <class F>
Real80 expectation(const Row& row, double Item::* score, F f) {
  const Real80 lse = log_sum_exp_of(row, score);
  Real80 sum = 0;
  for (const Item& e : row) sum += expl(e.*score - lse) * f(e);
  return sum;
}
template <class F>
Real80 total(const Row& row, F f) {
  Real80 sum = 0;
  for (const Item& e : row) sum += f(e);
  return sum;
}
Values rounded(std::initializer_list<Real80> list) {
  Values values;
  for (const Real80 x : list) values.push_back(static_cast<double>(x));
  return values;
}

// expected(row) must return the output for the row.
template <class Expected>
void check_values(const Subject& subject, Expected expected, Checks& checks) {
  const AnyMonoid& m = subject.monoid;
  checks.section(subject.name, "value");
  Random random(1);
  for (int trial = 0; trial < kTrials; ++trial) {
    const Row row = subject.row(random, 1 + below(random, 2 * kLongest));
    const Values output = m.statistics(m.project(fold_as_one_tile(m, row))), formula = expected(row);
    CHECK(checks, near(output, formula, tolerance(m, row)), output, formula);
  }
}

template <class R>
void check_all_values(Checks& checks) {
  check_values(
      log_sum_exp<LogSumExp<R>>(),
      [](const Row& row) { return rounded({log_sum_exp_of(row, &Item::score)}); }, checks);
  check_values(
      sum<Sum<R, Identity>>("Identity"),
      [](const Row& row) { return rounded({total(row, [](const Item& e) { return e.score; })}); }, checks);
  check_values(
      sum<Sum<R, Relu2>>("Relu2"),
      [](const Row& row) {
        return rounded(
            {total(row, [](const Item& e) { return e.score > 0 ? Real80(e.score) * e.score : 0; })});
      },
      checks);
  check_values(
      cross_entropy<CrossEntropy<R>>(),
      [](const Row& row) {
        return rounded({log_sum_exp_of(row, &Item::score),
                        total(row, [](const Item& e) { return e.column == e.label ? e.score : 0; }),
                        total(row, [](const Item& e) { return e.score; }) / Real80(row.size()),
                        Real80(row.size())});
      },
      checks);
  check_values(
      weighted_sum<WSum<R>>(),
      [](const Row& row) {
        const Real80 weight = total(row, [](const Item& e) { return e.score; });
        return rounded(
            {weight, total(row, [](const Item& e) { return Real80(e.score) * e.other; }) / weight});
      },
      checks);
  check_values(
      log_weighted_sum<LogWSum<R>>(),
      [](const Row& row) {
        return rounded({log_sum_exp_of(row, &Item::score),
                        expectation(row, &Item::score, [](const Item& e) { return e.other; })});
      },
      checks);
  check_values(
      arg_max<ArgMax<R>>(),
      [](const Row& row) {
        const Item best = *std::max_element(row.begin(), row.end(),
                                            [](const Item& a, const Item& b) { return a.score < b.score; });
        return Values{best.score, static_cast<double>(best.column)};
      },
      checks);
  // The log-sum-exps of P and Q, the centre (lse of P less the loss), and the loss.
  const auto expected = [](const Row& row, double Item::* p, double Item::* q, Real80 loss) {
    return rounded({log_sum_exp_of(row, p), log_sum_exp_of(row, q), log_sum_exp_of(row, p) - loss, loss});
  };
  // The losses by their definitions, as sums over the classes, from the log-probabilities of both sides.
  const auto loss = [](const Row& row, double Item::* under, auto term) {
    const Real80 student = log_sum_exp_of(row, &Item::score), teacher = log_sum_exp_of(row, &Item::other);
    return expectation(row, under, [&](const Item& e) { return term(e.score - student, e.other - teacher); });
  };
  check_values(
      distillation<Distillation<R, DistillationLoss::kCrossEntropy>>("cross entropy"),
      [=](const Row& row) {
        return expected(row, &Item::score, &Item::other,
                        loss(row, &Item::other, [](Real80 log_s, Real80) { return -log_s; }));
      },
      checks);
  check_values(
      distillation<Distillation<R, DistillationLoss::kForwardKL>>("forward KL"),
      [=](const Row& row) {
        return expected(row, &Item::score, &Item::other,
                        loss(row, &Item::other, [](Real80 log_s, Real80 log_t) { return log_t - log_s; }));
      },
      checks);
  check_values(
      distillation<Distillation<R, DistillationLoss::kReverseKL>>("reverse KL"),
      [=](const Row& row) {
        return expected(row, &Item::other, &Item::score,
                        loss(row, &Item::score, [](Real80 log_s, Real80 log_t) { return log_s - log_t; }));
      },
      checks);
}

// A log-sum-exp in two float words has more precision than a float. So the probability of a score that is near it, or between 0
// and it, is accurate to the last bits: neither the rounding of the logarithm nor that of the differences is left in it.
void check_two_words(Checks& checks) {
  const LogSumExp<float> m;
  Random random(5);
  const float inf = std::numeric_limits<float>::infinity();
  for (const float level : {40.f, 100.f, -3e4f}) {
    for (int trial = 0; trial < kTrials; ++trial) {
      const LogSumExp<float>::State state{level + static_cast<float>(normal(random, 3)),
                                          static_cast<float>(std::exp(normal(random, 3)))};
      const LogNumber<float> lse = m.project(state);
      const Real80 exact = Real80(state.frame) + logl(state.mass);
      checks.section("LogSumExp<float>", "the log-sum-exp in two words");
      const double lost = static_cast<double>(Real80(lse.high) + lse.low - exact);
      CHECK(checks, std::fabs(lost) < 1e-13 * std::fabs(lse.high), lost, lse.high);
      CHECK(checks, std::fabs(lse.low) < 1e-7 * std::fabs(lse.high), lse.low, lse.high);
      checks.section("LogSumExp<float>", "a share of it");
      const Element<float> e{lse.high - static_cast<float>(std::fabs(normal(random, 6))), 0, 0, 0};
      const double expected = static_cast<double>(expl(e.score - exact)), share = m.share(e, lse);
      CHECK(checks, near(share, expected, 1.5e-7 * expected), e.score, lse.high, share, expected);
      CHECK(checks, m.share({-inf, 0, 0, 0}, lse) == 0);
    }
  }
  checks.section("LogSumExp<float>", "shares of nothing, and of infinity");
  const LogNumber<float> nothing = m.project(m.identity());
  CHECK(checks, nothing.high == -inf && nothing.low == 0 && m.share({-inf, 0, 0, 0}, nothing) == 0);
  CHECK(checks, m.share({1, 0, 0, 0}, {inf, 0}) == 0 && std::isnan(m.share({1, 0, 0, 0}, {NAN, 0})));
}

// If student and teacher are equal, or differ by rounding errors, the KL losses are 0 or tiny, whatever the level of the
// scores.
void check_close_distributions(Checks& checks) {
  checks.section("Distillation", "student close to teacher");
  Random random(2);
  const auto forward = distillation<Distillation<float, DistillationLoss::kForwardKL>>("forward KL");
  const auto reverse = distillation<Distillation<float, DistillationLoss::kReverseKL>>("reverse KL");
  for (int trial = 0; trial < kTrials; ++trial) {
    Row row = forward.row(random, 20);
    for (Item& e : row) e.score = e.other = static_cast<float>(e.other + 100);
    for (const Subject* s : {&forward, &reverse}) {
      const Values output = s->monoid.statistics(s->monoid.project(fold_as_one_tile(s->monoid, row)));
      CHECK(checks, output[3] == 0, output);
    }
    for (Item& e : row) e.other = static_cast<float>(e.score + normal(random, 1e-3));
    const Values there =
        forward.monoid.statistics(forward.monoid.project(fold_as_one_tile(forward.monoid, row)));
    // The divergence is of second order in the difference: 1e-7 here, far below the rounding error of a log-sum-exp near 70.
    CHECK(checks, std::fabs(there[3]) < 2e-6, there);
  }
}

// A constant added to all scores of a side changes no probability. Neither the loss nor a local gradient may lose digits to
// such a constant.
template <DistillationLoss kLoss>
void check_levels(const char* name, Checks& checks) {
  checks.section("Distillation", std::string("levels of the scores, ") + name);
  Random random(6);
  const Distillation<float, kLoss> m;
  const auto product = [](const auto& monoid, const std::vector<Element<float>>& row) {
    using R = typename std::decay_t<decltype(monoid)>::Real;
    return monoid.project(fold_tile(monoid, monoid.identity(), static_cast<int>(row.size()), [&](int c) {
      return Element<R>{row[c].score, row[c].other, row[c].column, row[c].label};
    }));
  };
  for (const float student : {0.f, 10.f, 100.f, 1000.f}) {
    for (const float teacher : {0.f, 10.f, 100.f, 1000.f}) {
      for (int trial = 0; trial < kTrials / 10; ++trial) {
        std::vector<Element<float>> row;
        const auto score = [&] {
          return static_cast<float>(std::round(64 * normal(random)) / 64);
        };  // as exact at 1000
        for (int j = 0; j < kLongest; ++j) row.push_back({student + score(), teacher + score(), j, -1});
        const Distillation<double, kLoss> exact;
        const auto found = product(m, row);
        const auto expected = product(exact, row);
        const double slack = 1e-6 * (1 + expected.loss);
        CHECK(checks, near(found.loss, expected.loss, slack), found.loss, expected.loss, student, teacher);
        for (const Element<float>& e : row) {
          const Gradient<float> gradient = m.local_gradient(e, found, 1);
          const Gradient<double> slope =
              exact.local_gradient({e.score, e.other, e.column, e.label}, expected, 1);
          CHECK(checks, near(gradient.score, slope.score, slack), gradient.score, slope.score, student,
                teacher);
          CHECK(checks, near(gradient.other, slope.other, slack), gradient.other, slope.other, student,
                teacher);
        }
      }
    }
  }
}

// The same for cross entropy with label smoothing.
void check_smoothing_levels(Checks& checks) {
  checks.section("CrossEntropy", "levels of the scores");
  Random random(7);
  const CrossEntropy<float> m;
  for (const float level : {0.f, 10.f, 100.f, 1000.f, -1000.f}) {
    for (const double smoothing : {0.1, 1.}) {
      for (int trial = 0; trial < kTrials / 10; ++trial) {
        Row row;
        for (int j = 0; j < kLongest; ++j) {
          row.push_back({.score = level + std::round(64 * normal(random)) / 64, .column = j, .label = 3});
        }
        const auto p = m.project(fold_tile(m, m.identity(), kLongest, [&](int c) {
          return Element<float>{static_cast<float>(row[c].score), 0, static_cast<int>(row[c].column), 3};
        }));
        const float loss = CrossEntropyLoss<float>{static_cast<float>(smoothing), 0}.value(p, kLongest, {});
        const Real80 lse = log_sum_exp_of(row, &Item::score),
                     mean = total(row, [](const Item& e) { return e.score; }) / kLongest;
        const double exact =
            static_cast<double>((1 - smoothing) * (lse - row[3].score) + smoothing * (lse - mean));
        CHECK(checks, near(loss, exact, 2e-6), loss, exact, level, smoothing);
      }
    }
  }
}

// The loss of a row as a function of its statistics, and its gradient with respect to these, for every combination of options.
void check_cross_entropy_loss(Checks& checks) {
  Random random(3);
  for (const double smoothing : {0., 0.1, 1.}) {
    for (const double z_loss : {0., 1e-2}) {
      for (int trial = 0; trial < kTrials; ++trial) {
        const CrossEntropyLoss<double> rule{smoothing, z_loss};
        const Values p = {normal(random, 3), normal(random, 3), normal(random, 3)};
        // Seven classes. All weights are 1, or the target's and the mean are these.
        const RowWeights<double> weights = trial % 2 ? RowWeights<double>{} : RowWeights<double>{0.3, 1.7};
        const double sum = 7 * weights.mean;
        const auto value = [&](const Values& s) {
          return rule.value({{s[0], 0}, s[1], {s[2] / sum, 0}, sum}, 7, weights);
        };
        checks.section("CrossEntropyLoss", "value");
        const double expected = (1 - smoothing) * weights.target * (p[0] - p[1]) +
                                smoothing * (weights.mean * p[0] - p[2] / 7) + z_loss * p[0] * p[0];
        CHECK(checks, near(value(p), expected, 1e-13), value(p), expected, smoothing, z_loss);
        checks.section("CrossEntropyLoss", "upstream");
        const double g_loss = normal(random), g_lse = normal(random);
        const Values gradient = numbers(rule.upstream(p[0], 7, weights, g_loss, g_lse));
        for (int part = 0; part < 3; ++part) {
          const double slope = difference([&](double by) {
            Values moved = p;
            moved[part] += by;
            return g_loss * value(moved) + g_lse * moved[0];
          });
          CHECK(checks, near(gradient[part], slope, 1e-9), gradient, slope, part);
        }
      }
    }
  }
  checks.section("CrossEntropyLoss", "options that are off do not touch infinities");
  const double inf = std::numeric_limits<double>::infinity();
  const CrossEntropyLoss<double> plain{0, 0};
  const double of_nothing = plain.value({{-inf, 0}, -2, {-inf, 0}, 7}, 7, {}),
               of_some = plain.value({{3, 0}, 1, {-inf, 0}, 7}, 7, {});
  CHECK(checks, of_nothing == -inf, of_nothing);
  CHECK(checks, of_some == 2, of_some);
  CHECK(checks, same(numbers(plain.upstream(-inf, 7, {}, 1, 0)), {1, -1, -0.}),
        numbers(plain.upstream(-inf, 7, {}, 1, 0)));
  CHECK(checks, same(numbers(plain.upstream(inf, 7, {}, 0, 1)), {1, -0., -0.}),
        numbers(plain.upstream(inf, 7, {}, 0, 1)));
}

// All of cross entropy: from scores to the loss, and the gradient with respect to every score, through rule.upstream and D.
void check_cross_entropy_problem(Checks& checks) {
  checks.section("CrossEntropy", "whole problem");
  const CrossEntropy<double> m;
  Random random(4);
  for (int trial = 0; trial < kTrials; ++trial) {
    const int columns = 2 + below(random, 8), label = below(random, columns);
    const CrossEntropyLoss<double> rule{trial % 2 ? 0.2 : 0, trial % 3 ? 0.05 : 0};
    Values scores;
    for (int j = 0; j < columns; ++j) scores.push_back(normal(random, 3));
    const auto element = [&](const Values& s, int j) { return Element<double>{s[j], 0, j, label}; };
    const auto product = [&](const Values& s) {
      return m.project(fold_tile(m, m.identity(), columns, [&](int j) { return element(s, j); }));
    };
    const double g_loss = normal(random), g_lse = normal(random);
    const auto upstream = rule.upstream(product(scores).lse.high, columns, {}, g_loss, g_lse);
    for (int j = 0; j < columns; ++j) {
      const double gradient = m.local_gradient(element(scores, j), product(scores), upstream).score;
      const double slope = difference([&](double by) {
        Values moved = scores;
        moved[j] += by;
        return g_loss * rule.value(product(moved), columns, {}) + g_lse * product(moved).lse.high;
      });
      CHECK(checks, near(gradient, slope, 1e-8), gradient, slope, j, label);
    }
  }
}

// An attention sink gives the same results as one more element with payload 0.
template <class R>
void check_sinks(Checks& checks) {
  const WithPayload<LogSumExp<R>, 1> m{};
  const double inf = std::numeric_limits<double>::infinity();
  Random random(5);
  checks.section("join_sink", "one more element");
  for (int trial = 0; trial < kTrials; ++trial) {
    const auto element = [&] { return Element<R>{R(normal(random, 9)), R(0), 0, -1}; };
    auto state = m.identity();
    for (int n = below(random, 4); n > 0; --n)
      state = m.combine(state, m.lift(element(), {R(normal(random))}));
    const Element<R> sink = element();
    const auto expected = m.combine(state, m.lift(sink, {R(0)}));
    const R scale = join_sink(m.m, state.scalar, sink.score);
    CHECK(checks, near(state.scalar.mass, expected.scalar.mass, 1e-6), state.scalar.mass,
          expected.scalar.mass);
    CHECK(checks, state.scalar.frame == expected.scalar.frame, state.scalar.frame, expected.scalar.frame);
    CHECK(checks, near(state.payload[0] * scale, expected.payload[0], 1e-6), scale, expected.payload[0]);
  }
  checks.section("join_sink", "no weight, and no number");
  const typename LogSumExp<R>::State before{R(3), R(2)};
  auto same_state = before, nothing = m.m.identity();
  CHECK(checks, join_sink(m.m, same_state, R(-inf)) == R(1));
  CHECK(checks, same_state.frame == before.frame && same_state.mass == before.mass, same_state.mass);
  join_sink(m.m, nothing, R(-inf));
  CHECK(checks, m.m.project(nothing).high == -inf, nothing.mass);
  for (const double bad : {inf, double{NAN}}) {
    for (auto state : {before, m.m.identity()}) {
      const R scale = join_sink(m.m, state, R(bad)), lse = m.m.project(state).high;
      CHECK(checks, scale != scale && !(lse < inf), scale, lse, bad);
    }
  }
}

// Row policies (rows.h): which rows are active, and what ignored, invalid and masked rows store and pass back.
void check_rows(Checks& checks) {
  checks.section("CrossEntropyRows", "ignored and invalid targets");
  const std::int64_t target[] = {2, -100, 7, -1, 0};
  double loss[5], lse[5] = {1, 1, 1, 1, 1}, low[5], g_loss[] = {2, 3, 5, 7, 11}, g_lse[] = {1, 1, 1, 1, 1};
  CrossEntropyRows<double> rows{{target, 1, -100, 7}, {0, 0}, nullptr, loss, lse, low, {g_loss, 1}, {}};
  for (int row = 0; row < 5; ++row) rows.store(row, {{4, 0.25}, 1, {9, 0}, 7});
  CHECK(checks, same(Values(loss, loss + 5), {3.25, 0, NAN, NAN, 3.25}), Values(loss, loss + 5));
  CHECK(checks, same(Values(lse, lse + 5), {4, 4, 4, 4, 4}), Values(lse, lse + 5));
  CHECK(checks, !rows.active(1) && rows.active(0) && rows.active(2));
  CHECK(checks, same(numbers(rows.upstream(0)), {2, -2, -0.}), numbers(rows.upstream(0)));
  CHECK(checks, any_nan(numbers(rows.upstream(2))) && any_nan(numbers(rows.upstream(3))));
  rows.grad_lse = {g_lse, 1};  // an ignored row's lse has a gradient, but its loss has none
  CHECK(checks, rows.active(1) && near(numbers(rows.upstream(1)), {1, 0, 0}, 0), numbers(rows.upstream(1)));
  checks.section("CrossEntropyRows", "the weight of a part of the classes in the loss");
  double weight[5];
  CrossEntropyRows<double> part{
      {target, 1, -100, 7, 2, 3}, {0.25, 0}, nullptr, loss, lse, low, {}, {}, weight};
  for (int row : {0, 1, 4}) part.store(row, {{4, 0}, 1, {3, 0}, 3});
  const double soft = 0.25 * 3 / 7;  // of the three classes from 2 on
  CHECK(checks, near({weight[0], weight[1], weight[4]}, {0.75 + soft, 0, soft}, 1e-15),
        Values(weight, weight + 5));
  CHECK(checks, near({loss[0], loss[1], loss[4]}, {0.75 * 3 + soft, 0, soft}, 1e-15), Values(loss, loss + 5));
  part.skip(0);
  CHECK(checks, loss[0] == 0 && weight[0] == 0 && lse[0] == 0);

  checks.section("CrossEntropyRows", "strides");
  rows.grad_loss = {g_loss, 0};
  CHECK(checks, rows.upstream(4).lse == 3, numbers(rows.upstream(4)));
  rows.store(4, {{4, 0.25}, 1, {9, 0}, 7});
  CHECK(checks, rows.product(4).lse.high == 4 && rows.product(4).lse.low == 0.25);

  checks.section("DistillationRows", "mask");
  const bool mask[] = {true, false};
  double stats[12], row_loss[2];
  const DistillationRows<double> pair{mask, 1, 2, row_loss, stats, {g_loss, 1}};
  for (int row = 0; row < 2; ++row) pair.store(row, {{1, 2}, {3, 4}, {5, 6}, 7});
  CHECK(checks, pair.active(0) && !pair.active(1) && row_loss[0] == 7 && row_loss[1] == 0);
  CHECK(checks, same(Values(stats, stats + 12), {1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6}),
        Values(stats, stats + 12));
  CHECK(checks, same(numbers(pair.product(1)), {1, 2, 3, 4, 5, 6, 0}), numbers(pair.product(1)));
  CHECK(checks, pair.upstream(1) == 3);
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  using namespace monoidreduce;
  using namespace monoidreduce::test;
  Checks checks;
  check_all_values<float>(checks);
  check_all_values<double>(checks);
  check_two_words(checks);
  check_close_distributions(checks);
  check_levels<DistillationLoss::kCrossEntropy>("cross entropy", checks);
  check_levels<DistillationLoss::kForwardKL>("forward KL", checks);
  check_levels<DistillationLoss::kReverseKL>("reverse KL", checks);
  check_smoothing_levels(checks);
  check_cross_entropy_loss(checks);
  check_cross_entropy_problem(checks);
  check_sinks<float>(checks);
  check_sinks<double>(checks);
  check_rows(checks);
  return checks.finish();
}
