// The laws of a monoid, checked on random and on extreme elements. check_laws(subject, checks) runs every law that
// applies to the subject:
//
//   Monoid           identity, commutativity, associativity, split trees, tile fold, NaN,
//                    D against finite differences
//   FramedMonoid     frames form a semilattice, reframe composes, accumulate agrees with combine of a lift
//   MonotoneMonoid   the largest scores determine the frame of all elements
//   PayloadMonoid    rescale composes, mass and weight follow it, share is the final weight (softmax probability);
//                    as WithPayload, the laws of a Monoid again, and the gradients of a whole problem
//                    with respect to scores and payload
//   MaskableMonoid   an element with the score absent() has no weight in any frame, and changes nothing
//
// check_precision(single, twice, checks) compares a monoid's float version with its double version.
// Tolerances allow a few roundings per addition, of the largest number added. Exact results are compared bit by bit.
#pragma once

#include <numeric>
#include <random>
#include <string>

#include "any_monoid.h"
#include "check.h"

namespace monoidreduce::test {

using Random = std::mt19937_64;

inline double normal(Random& random, double deviation = 1) {
  return std::normal_distribution<double>(0, deviation)(random);
}
inline int below(Random& random, int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); }

inline bool any_nan(const Values& list) {
  return std::any_of(list.begin(), list.end(), [](double x) { return std::isnan(x); });
}
// Equal bit by bit, except that all NaN are equal.
inline bool same(double a, double b) {
  return (a == b && std::signbit(a) == std::signbit(b)) || (std::isnan(a) && std::isnan(b));
}
// Equal within the tolerance; infinities and NaN must agree.
inline bool near(double a, double b, double tolerance) {
  return a == b || (std::isnan(a) && std::isnan(b)) || std::fabs(a - b) <= tolerance;
}
inline bool same(const Values& a, const Values& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) { return same(x, y); });
}
inline bool near(const Values& a, const Values& b, double tolerance) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [=](double x, double y) { return near(x, y, tolerance); });
}
// The largest finite absolute value.
inline double magnitude(const Values& list) {
  double most = 0;
  for (const double x : list) most = std::isfinite(x) ? std::max(most, std::fabs(x)) : most;
  return most;
}
inline double dot(const Values& a, const Values& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.);
}

// ---- What the laws are checked on.

using Row = std::vector<Item>;
inline constexpr int kPayload = 3;

// A monoid, and what the suite needs to know about it. The defaults suit most monoids.
struct Subject {
  std::string name;
  AnyMonoid monoid;
  std::optional<AnyMonoid> with_payload = {};

  // A random element of a column. Its scores must stay at least 0.005 away from points where the output has no derivative.
  std::function<Item(Random&, int)> element = [](Random& random, int column) {
    return Item{.score = normal(random, 4), .other = normal(random, 2), .column = column};
  };
  // Scores at which sums, frames and guards are likely to break. An element gets one of them, or a whole row is gathered around
  // one.
  Values extremes = {0.,  -0.,  monoid.smallest_normal * monoid.epsilon, -monoid.smallest_normal, 200, -200,
                     1e5, -1e5, -std::numeric_limits<double>::infinity()};
  // The scalar function of the output's statistics of which local_gradient(element, output, upstream) is the derivative.
  std::function<double(const Values&, const Values&)> objective =
      [](const Values& statistics, const Values& upstream) { return dot(statistics, upstream); };
  // The score of an element that changes nothing, which can therefore stand for a masked one.
  std::optional<double> absent = monoid.absent;
  // Whether combine only chooses and never rounds (max, min). Results may then not differ at all.
  bool exact = false;

  // A row of random elements with consecutive columns, which need not begin at 0. The row's label is one of them, or none.
  Row row(Random& random, int count) const {
    Row items;
    const int first = below(random, 4), label = first - 1 + below(random, count + 2);
    for (int column = first; column < first + count; ++column) {
      Item e = element(random, column);
      e.label = label;
      e.score = monoid.rounded(e.score), e.other = monoid.rounded(e.other);
      e.payload = {monoid.rounded(normal(random)), monoid.rounded(normal(random)), -0.};
      items.push_back(e);
    }
    return items;
  }
  // A row with extreme scores, ties included.
  Row extreme_row(Random& random, int count) const {
    const auto extreme = [&] { return extremes[below(random, static_cast<int>(extremes.size()))]; };
    Row items = row(random, count);
    const double centre = extreme();
    const bool gathered = below(random, 2);
    for (Item& e : items) {
      if (gathered) e.score = below(random, 2) ? centre : monoid.rounded(centre + e.score);
      if (!gathered && below(random, 2)) e.score = extreme();
      if (below(random, 4) == 0) e.score = items[below(random, count)].score;
      const double other = extreme();
      if (below(random, 4) == 0 && std::isfinite(other)) e.other = other;
    }
    return items;
  }
  Row any_row(Random& random, int count) const {
    return below(random, 2) ? extreme_row(random, count) : row(random, count);
  }
  Values upstream(Random& random) const {
    Values g(monoid.upstream_parts);
    for (double& part : g) part = monoid.rounded(normal(random));
    return g;
  }
};

template <Monoid M>
Subject subject(const std::string& name, const M& m = {}) {
  Subject s{.name = name, .monoid = any_monoid(m)};
  if constexpr (PayloadMonoid<M>) s.with_payload = any_payload_monoid(WithPayload<M, kPayload>{m});
  return s;
}

// ---- Folds to compare.

inline Values fold_in_order(const AnyMonoid& m, const Row& row) {
  Values state = m.identity();
  for (const Item& e : row) state = m.combine(state, m.lift(e));
  return state;
}

// Folds items [begin, end) in a random tree: splits anywhere, also with an empty side, and combines either side first.
inline Values fold_as_tree(const AnyMonoid& m, const Row& row, int begin, int end, Random& random) {
  if (begin == end) return m.identity();
  if (begin + 1 == end) return m.lift(row[begin]);
  const int middle = begin + 1 + below(random, end - begin - 1);
  const Values left = fold_as_tree(m, row, begin, middle, random),
               right = fold_as_tree(m, row, middle, end, random);
  const Values both = below(random, 2) ? m.combine(left, right) : m.combine(right, left);
  const int padding = below(random, 4);
  return padding == 0 ? m.combine(both, m.identity()) : padding == 1 ? m.combine(m.identity(), both) : both;
}

// Folds items [first, first + count) into state. Items beyond these are NaN, so that reading them is noticed.
inline Values fold_one_tile(const AnyMonoid& m, const Values& state, const Row& row, int first, int count) {
  return m.fold_tile(state, count, [&](int c) { return c < count ? row[first + c] : Item{NAN, NAN}; });
}
inline Values fold_as_one_tile(const AnyMonoid& m, const Row& row) {
  return fold_one_tile(m, m.identity(), row, 0, static_cast<int>(row.size()));
}

// The tolerance between two ways of folding a row.
inline double tolerance(const AnyMonoid& m, const Row& row) {
  double most = magnitude(m.project(fold_in_order(m, row)));
  for (const Item& e : row) most = std::max(most, magnitude(m.project(m.lift(e))));
  return m.epsilon * 4 * (row.size() + 1) * (1 + most);
}

inline constexpr int kTrials = 500;
inline constexpr int kLongest = 20;

// ---- The laws.

// The laws of identity and combine. m is subject.monoid or subject.with_payload.
inline void check_combine(const Subject& subject, const AnyMonoid& m, const std::string& name,
                          Checks& checks) {
  Random random(1);
  checks.section(name, "identity");
  const Values empty = m.identity();
  CHECK(checks, same(m.combine(empty, empty), empty), m.combine(empty, empty), empty);
  CHECK(checks, !any_nan(m.project(empty)), m.project(empty));
  for (int trial = 0; trial < kTrials; ++trial) {
    const Row row = subject.any_row(random, 1 + below(random, 4));
    for (const Values& state : {m.lift(row[0]), fold_in_order(m, row)}) {
      const Values left = m.combine(empty, state), right = m.combine(state, empty);
      if (any_nan(m.project(state))) {
        CHECK(checks, any_nan(m.project(left)) && any_nan(m.project(right)), left, right, state);
      } else {
        CHECK(checks, same(left, state), left, state);
        CHECK(checks, same(right, state), right, state);
      }
    }
  }
  for (int trial = 0; trial < kTrials; ++trial) {
    Row row = subject.any_row(random, 5);
    double slack = subject.exact ? 0 : tolerance(m, row);
    const Values a = m.lift(row[0]), b = fold_in_order(m, {row[1], row[2], row[3]}), c = m.lift(row[4]);
    checks.section(name, "commutativity");
    const Values ab = m.project(m.combine(a, b)), ba = m.project(m.combine(b, a));
    CHECK(checks, near(ab, ba, slack), ab, ba, a, b);
    checks.section(name, "associativity");
    const Values left = m.project(m.combine(m.combine(a, b), c)),
                 right = m.project(m.combine(a, m.combine(b, c)));
    CHECK(checks, near(left, right, slack), left, right, a, b, c);
    checks.section(name, "split trees");
    row = subject.any_row(random, below(random, kLongest + 1));
    slack = subject.exact ? 0 : tolerance(m, row);
    const Values in_order = m.project(fold_in_order(m, row));
    std::shuffle(row.begin(), row.end(), random);
    const Values tree = m.project(fold_as_tree(m, row, 0, static_cast<int>(row.size()), random));
    CHECK(checks, near(tree, in_order, slack), tree, in_order);
  }
}

// Folding ragged tiles, empty ones included, agrees with one combine per element.
inline void check_tile_fold(const Subject& subject, Checks& checks) {
  const AnyMonoid& m = subject.monoid;
  constexpr int kTile = 4;
  checks.section(subject.name, "tile fold");
  Random random(2);
  for (int trial = 0; trial < 2 * kTrials; ++trial) {
    const int count = below(random, kLongest + 1);
    const Row row = subject.any_row(random, count);
    Values state = m.identity();
    for (int first = 0; first < count;) {
      const int in_tile = std::min(below(random, kTile + 1), count - first);
      state = fold_one_tile(m, state, row, first, in_tile);
      first += in_tile;
    }
    const Values tiled = m.project(state), in_order = m.project(fold_in_order(m, row));
    CHECK(checks, near(tiled, in_order, subject.exact ? 0 : tolerance(m, row)), tiled, in_order);
    const Values unchanged = fold_one_tile(m, state, row, 0, 0);
    CHECK(checks, same(unchanged, state), unchanged, state);
  }
}

// One or several NaN scores reach the same parts of the output, however the row is folded.
inline void check_nan(const Subject& subject, Checks& checks) {
  const AnyMonoid& m = subject.monoid;
  checks.section(subject.name, "NaN");
  Random random(3);
  for (int trial = 0; trial < kTrials; ++trial) {
    Row row = subject.row(random, 1 + below(random, kLongest));
    const int count = static_cast<int>(row.size());
    for (int n = below(random, 3); n >= 0; --n) {
      Item& e = row[below(random, count)];
      (m.scores == 2 && trial % 2 ? e.other : e.score) = NAN;
    }
    const Values tiled = m.project(fold_as_one_tile(m, row));
    const Values tree = m.project(fold_as_tree(m, row, 0, count, random));
    CHECK(checks, any_nan(tiled), tiled);
    CHECK(checks, near(tiled, tree, subject.exact ? 0 : tolerance(m, row)), tiled, tree);
  }
}

// An element with the absent score changes nothing, and has neither weight nor gradient, among other elements and alone.
inline void check_absent(const Subject& subject, Checks& checks) {
  const AnyMonoid& m = subject.monoid;
  checks.section(subject.name, "absent is neutral");
  Random random(4);
  for (int trial = 0; trial < kTrials; ++trial) {
    Row row = subject.row(random, below(random, 5));
    const Values without = m.project(fold_in_order(m, row));
    Item excluded = subject.row(random, 1)[0];
    excluded.score = *subject.absent;
    row.insert(row.begin() + below(random, static_cast<int>(row.size()) + 1), excluded);
    const Values state = fold_in_order(m, row), in_order = m.project(state),
                 tiled = m.project(fold_as_one_tile(m, row));
    CHECK(checks, near(in_order, without, 0), in_order, without);
    CHECK(checks, near(tiled, without, tolerance(m, row)), tiled, without);
    if (m.weighted) {
      for (const Values& frame : {m.frame_of(state), m.frame_of(m.identity())})
        CHECK(checks, m.weight(excluded, frame) == 0, frame);
    }
    for (const Values& product : {in_order, m.project(m.identity())}) {
      const Values gradient = m.local_gradient(excluded, product, subject.upstream(random));
      CHECK(checks, near(gradient, {0, 0}, 0), gradient, product);
    }
  }
}

// Central difference of f at 0, of fourth order in the step.
template <class F>
double difference(F f) {
  constexpr double h = 1e-3;
  return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h);
}
// The error of difference() relative to the magnitude of f: 1e-12 from rounding, and 1e-12 times the fifth derivative from
// truncation.
inline constexpr double kDifferenceTolerance = 1e-9;

// local_gradient is the derivative of the projected fold with respect to each score, for each part of the output. In double.
inline void check_local_gradient(const Subject& subject, Checks& checks) {
  const AnyMonoid& m = subject.monoid;
  checks.section(subject.name, "local gradient");
  Random random(5);
  for (int trial = 0; trial < kTrials; ++trial) {
    const Row row = subject.row(random, 1 + below(random, 8));
    const int j = below(random, static_cast<int>(row.size()));
    const Values product = m.project(fold_in_order(m, row));
    const double slack = kDifferenceTolerance * (1 + magnitude(product));
    for (int part = 0; part <= m.upstream_parts; ++part) {  // each part alone, then all together
      Values g(m.upstream_parts, 0.);
      if (part < m.upstream_parts) {
        g[part] = 1;
      } else {
        g = subject.upstream(random);
      }
      const auto derivative = [&](double Item::* score) {
        return difference([&](double by) {
          Row moved = row;
          moved[j].*score += by;
          return subject.objective(m.statistics(m.project(fold_in_order(m, moved))), g);
        });
      };
      const Values gradient = m.local_gradient(row[j], product, g);
      const Values expected = {derivative(&Item::score), m.scores == 2 ? derivative(&Item::other) : 0};
      CHECK(checks, near(gradient, expected, slack), gradient, expected, g, product);
    }
  }
}

inline void check_frames(const Subject& subject, Checks& checks) {
  const AnyMonoid& m = subject.monoid;
  Random random(6);
  for (int trial = 0; trial < 2 * kTrials; ++trial) {
    const Row row = subject.any_row(random, 4);
    const double slack = tolerance(m, row);
    const Values lifted = m.lift(row[0]), state = m.combine(lifted, m.lift(row[1]));
    const Values f = m.frame(row[0]), g = m.frame(row[1]), h = m.frame(row[2]),
                 none = m.frame_of(m.identity());

    checks.section(subject.name, "frames are a semilattice");
    CHECK(checks, same(m.join(f, f), f), f);
    CHECK(checks, near(m.join(f, g), m.join(g, f), 0), f, g);
    CHECK(checks, near(m.join(m.join(f, g), h), m.join(f, m.join(g, h)), 0), f, g, h);
    CHECK(checks, same(m.join(none, f), f) && same(m.join(f, none), f), f, none);
    CHECK(checks, same(m.frame_of(lifted), f), m.frame_of(lifted), f);
    CHECK(checks, near(m.frame_of(state), m.join(f, g), 0), m.frame_of(state), f, g);

    if (any_nan(m.project(fold_in_order(m, row)))) continue;
    checks.section(subject.name, "reframe");
    const Values up = m.join(m.frame_of(state), h), further = m.join(up, m.frame(row[3]));
    CHECK(checks, same(m.reframe(state, m.frame_of(state)), state), m.reframe(state, m.frame_of(state)),
          state);
    CHECK(checks, same(m.frame_of(m.reframe(state, up)), up), m.frame_of(m.reframe(state, up)), up);
    const Values direct = m.reframe(state, further), by_steps = m.reframe(m.reframe(state, up), further);
    CHECK(checks, near(direct, by_steps, slack), direct, by_steps, state);
    const Values empty = m.reframe(m.identity(), m.frame_of(state));
    CHECK(checks, near(m.project(m.combine(empty, state)), m.project(state), 0), empty, state);

    checks.section(subject.name, "accumulate");
    const Values reached = m.accumulate(m.reframe(state, up), row[2]),
                 combined = m.combine(state, m.lift(row[2]));
    CHECK(checks, near(m.project(reached), m.project(combined), slack), reached, combined);
    CHECK(checks, same(m.frame_of(reached), up), reached, up);
  }
}

// The frame of the largest scores is the frame of all elements. Scores of -inf do not count.
inline void check_monotone_frames(const Subject& subject, Checks& checks) {
  const AnyMonoid& m = subject.monoid;
  checks.section(subject.name, "frames are monotone");
  Random random(11);
  for (int trial = 0; trial < kTrials; ++trial) {
    constexpr double kNone = -std::numeric_limits<double>::infinity();
    Item largest{.score = kNone, .other = kNone};
    Values all = m.join(m.frame_of(m.identity()), m.frame(largest));
    for (const Item& e : subject.any_row(random, 1 + below(random, kLongest))) {
      all = m.join(all, m.frame(e));
      largest.factor = e.factor;
      largest.score = std::max(largest.score, e.score), largest.other = std::max(largest.other, e.other);
    }
    CHECK(checks, near(m.frame(largest), all, 0), m.frame(largest), all, largest.score, largest.other);
  }
}

inline void check_weights(const Subject& subject, Checks& checks) {
  const AnyMonoid& m = subject.monoid;
  Random random(7);
  for (int trial = 0; trial < 2 * kTrials; ++trial) {
    const Row row = subject.any_row(random, 4);
    const Values a = m.lift(row[0]), b = m.combine(m.lift(row[1]), m.lift(row[2])),
                 state = fold_in_order(m, row);
    if (any_nan(m.project(state))) continue;
    const Values f = m.frame_of(a), g = m.join(f, m.frame_of(b)), h = m.join(g, m.frame(row[3]));
    // Exponentials have relative errors as large as the rounding of the scores. Below the smallest normal number they may be
    // flushed to 0.
    double largest = 0;
    for (const Item& e : row) largest = std::max(largest, magnitude({e.score}));
    const auto close = [&](double x, double y) {
      return near(x, y, m.epsilon * 8 * (1 + largest) * magnitude({x, y}) + 2 * m.smallest_normal);
    };
    checks.section(subject.name, "rescale");
    CHECK(checks, close(m.rescale(f, h), m.rescale(f, g) * m.rescale(g, h)), f, g, h);
    CHECK(checks, close(m.mass(m.reframe(a, g)), m.rescale(f, g) * m.mass(a)), a, g);
    CHECK(checks, close(m.mass(m.reframe(b, g)), m.rescale(m.frame_of(b), g) * m.mass(b)), b, g);
    const double sum = m.rescale(f, g) * m.mass(a) + m.rescale(m.frame_of(b), g) * m.mass(b);
    const double rounding = tolerance(m, row);
    CHECK(checks, near(m.mass(m.combine(a, b)), sum, rounding), m.combine(a, b), a, b);

    checks.section(subject.name, "weight");
    CHECK(checks, close(m.mass(a), m.weight(row[0], f)), a, m.weight(row[0], f));
    CHECK(checks, close(m.weight(row[0], h), m.rescale(f, h) * m.weight(row[0], f)), row[0].score, f, h);
    const Values alone = m.accumulate(m.reframe(m.identity(), h), row[3]);
    CHECK(checks, close(m.mass(alone), m.weight(row[3], h)), alone, m.weight(row[3], h));

    checks.section(subject.name, "share");
    // The error may be that of rounding differences of scores, however large the scores themselves are.
    double least = std::numeric_limits<double>::infinity(), most = -least;
    for (const Item& e : row) {
      if (std::isfinite(e.score)) least = std::min(least, e.score), most = std::max(most, e.score);
    }
    const double total = m.normalized ? m.mass(state) : 1, spread = std::max(most - least, 0.);
    for (const Item& e : row) {
      const double share = m.share(e, m.project(state)), weight = m.weight(e, m.frame_of(state));
      const double slack = m.epsilon * 8 * (1 + spread) * magnitude({weight}) + 2 * m.smallest_normal;
      CHECK(checks, near(share * total, weight, slack), share, weight, total, e.score, state);
    }
  }
}

// The payload's fold is the sum of every payload times its element's share (softmax probability).
inline void check_payload(const Subject& subject, Checks& checks) {
  const AnyMonoid &m = subject.monoid, &folded = *subject.with_payload;
  checks.section(subject.name, "payload");
  Random random(10);
  for (int trial = 0; trial < kTrials; ++trial) {
    const Row row = subject.any_row(random, below(random, kLongest + 1));
    const Values output = folded.project(fold_in_order(folded, row)),
                 product(output.begin(), output.end() - kPayload);
    if (any_nan(output)) continue;
    Values expected(kPayload);
    for (const Item& e : row) {
      for (int d = 0; d < kPayload; ++d) expected[d] += m.share(e, product) * e.payload[d];
    }
    const Values payload(output.end() - kPayload, output.end());
    CHECK(checks, near(payload, expected, tolerance(folded, row) * (1 + magnitude(product))), payload,
          expected);
  }
}

// The gradients of <G, out> + g P with respect to every score and every payload component of a row, through pull(). In double.
inline void check_payload_gradients(const Subject& subject, Checks& checks) {
  const AnyMonoid &m = subject.monoid, &folded = *subject.with_payload;
  checks.section(subject.name, "payload gradients");
  Random random(8);
  for (int trial = 0; trial < kTrials; ++trial) {
    const Row row = subject.row(random, 1 + below(random, 8));
    Values grad(1 + kPayload);  // upstream gradients of a projection's parts: P, out
    for (double& part : grad) part = normal(random);
    const Values grad_out(grad.begin() + 1, grad.end());
    const Values output = folded.project(fold_in_order(folded, row)),
                 product(output.begin(), output.end() - kPayload);
    const double c =
        m.normalized ? grad[0] - dot(grad_out, Values(output.end() - kPayload, output.end())) : grad[0];
    const double slack = kDifferenceTolerance * (1 + magnitude(output));
    for (int j = 0; j < static_cast<int>(row.size()); ++j) {
      const auto derivative = [&](auto member) {
        return difference([&](double by) {
          Row moved = row;
          member(moved[j]) += by;
          return dot(folded.statistics(folded.project(fold_in_order(folded, moved))), grad);
        });
      };
      const Values pulled = m.pull(row[j], product, c, dot(grad_out, row[j].payload));
      const double by_score = derivative([](Item& e) -> double& { return e.score; });
      CHECK(checks, near(pulled[0], by_score, slack), pulled, by_score);
      for (int d = 0; d < kPayload; ++d) {
        const double by_payload = derivative([d](Item& e) -> double& { return e.payload[d]; });
        CHECK(checks, near(pulled[1] * grad_out[d], by_payload, slack), pulled, by_payload, grad_out);
      }
    }
  }
}

inline void check_laws(const Subject& subject, Checks& checks) {
  const AnyMonoid& m = subject.monoid;
  check_combine(subject, m, subject.name, checks);
  check_tile_fold(subject, checks);
  check_nan(subject, checks);
  if (subject.absent) check_absent(subject, checks);
  if (m.is_double()) check_local_gradient(subject, checks);
  if (m.framed) check_frames(subject, checks);
  if (m.monotone) check_monotone_frames(subject, checks);
  if (m.weighted) {
    check_weights(subject, checks);
    check_combine(subject, *subject.with_payload, subject.name + " with payload", checks);
    check_payload(subject, checks);
    if (m.is_double()) check_payload_gradients(subject, checks);
  }
}

// Compares output and local gradients in float with those in double.
inline void check_precision(const Subject& single, const Subject& twice, Checks& checks) {
  const AnyMonoid &m = single.monoid, &reference = twice.monoid;
  checks.section(single.name, "precision");
  Random random(9);
  for (int trial = 0; trial < kTrials; ++trial) {
    const Row row = single.row(random, 1 + below(random, kLongest));
    const Values product = m.project(fold_in_order(m, row)),
                 expected = reference.project(fold_in_order(reference, row));
    const double slack = single.exact ? 0 : tolerance(m, row);
    CHECK(checks, near(m.statistics(product), reference.statistics(expected), slack), product, expected);
    const Values g = single.upstream(random);
    for (const Item& e : row) {
      const Values gradient = m.local_gradient(e, product, g),
                   exact = reference.local_gradient(e, expected, g);
      CHECK(checks, near(gradient, exact, slack * (1 + magnitude(g)) * (1 + magnitude(expected))), gradient,
            exact, g);
    }
  }
}

}  // namespace monoidreduce::test
