// Tests score policies: the order of scale, bias and softcap, and slopes against differences. Tests column ranges against brute
// force.
#include "monoidreduce/score.h"

#include "laws.h"

namespace monoidreduce::test {
namespace {

// The three formulas at the top of score.h.
double formula(const ScoreOptions& o, double dot, double bias) {
  const double inside = o.scale * dot + (o.bias_inside ? bias : 0);
  const double capped = o.softcap == 0 ? inside : o.softcap * std::tanh(inside / o.softcap);
  return capped + (o.bias_inside ? 0 : bias);
}

template <class R>
void check_option(const ScoreOptions& options, Checks& checks) {
  const double epsilon = std::numeric_limits<R>::epsilon(), c = options.softcap;
  const Score<R> score(options);
  Random random(1);
  for (int trial = 0; trial < 50; ++trial) {
    const R dot = static_cast<R>(normal(random, 10)), bias = static_cast<R>(normal(random, 3));
    const double size = std::fabs(options.scale * dot) + std::fabs(bias);
    checks.section("Score", "value");
    const double value = score.value(dot, bias), expected = formula(options, dot, bias);
    CHECK(checks, near(value, expected, 8 * epsilon * (size + c)), options.scale, c, options.bias_inside, dot,
          bias, value, expected);
    checks.section("Score", "bias of -inf");  // masks the element, unless the softcap bounds it
    const double excluded = score.value(dot, -infinity<R>());
    const double least = options.bias_inside && c != 0 ? -c : -std::numeric_limits<double>::infinity();
    CHECK(checks, near(excluded, least, 8 * epsilon * c), excluded, c, options.bias_inside);
    if constexpr (std::is_same_v<R, double>) {
      checks.section("Score", "slope");
      const double slope = score.slope(dot, bias);
      const double by_dot = difference([&](double by) { return score.value(dot + by, bias); });
      const double by_bias = difference([&](double by) { return score.value(dot, bias + by); });
      // The fifth derivative of the softcap grows as c^-4.
      const double slack = kDifferenceTolerance * (1 + size) * (c == 0 ? 1 : std::max(1., std::pow(c, -4)));
      CHECK(checks, near(slope * options.scale, by_dot, slack), slope, by_dot, options.scale, c);
      CHECK(checks, near(options.bias_inside ? slope : 1, by_bias, slack), slope, by_bias, c);
    }
  }
}

template <class R>
void check_scores(Checks& checks) {
  for (const double scale : {1., 0.125, -2., 0.}) {
    for (const double softcap : {0., 0.5, 30.}) {
      check_option<R>({scale, softcap, false}, checks);
      check_option<R>({scale, softcap, true}, checks);
    }
  }
}

// begin and end are in [0, columns], once begin is cut to the columns, and exactly the columns between them are in the window.
void check_ranges(Checks& checks) {
  constexpr std::int64_t kNone = ColumnRange::kUnbounded;
  checks.section("ColumnRange", "brute force");
  for (const std::int64_t left :
       {kNone, std::int64_t(0), std::int64_t(1), std::int64_t(3), std::int64_t(100)}) {
    for (const std::int64_t right :
         {kNone, std::int64_t(0), std::int64_t(1), std::int64_t(3), std::int64_t(100)}) {
      for (std::int64_t rows = 0; rows <= 7; ++rows) {
        for (std::int64_t columns = 0; columns <= 7; ++columns) {
          // The shift that aligns the last row with the last column, as in attention, and others: windows that lie entirely
          // before the first column or after the last.
          for (const std::int64_t shift :
               {columns - rows, std::int64_t(0), std::int64_t(-9), std::int64_t(9)}) {
            const ColumnRange range{left, right, shift}, less = range.bounding(rows, columns);
            bool every = true;
            for (std::int64_t row = 0; row < rows; ++row) {
              const std::int64_t begin = range.begin(row), end = range.end(row, columns);
              every = every && begin == 0 && end == columns;
              CHECK(checks, less.begin(row) == begin && less.end(row, columns) == end, left, right, shift,
                    row, rows, columns);
              CHECK(checks, begin >= 0 && end >= 0 && end <= columns, left, right, shift, row, columns, begin,
                    end);
              for (std::int64_t column = 0; column < columns; ++column) {
                const std::int64_t distance = column - (row + shift);
                const bool kept =
                    (left == kNone || distance >= -left) && (right == kNone || distance <= right);
                CHECK(checks, kept == (begin <= column && column < end), left, right, shift, row, column,
                      begin, end);
              }
            }
            if (rows > 0) CHECK(checks, less.all() == every, left, right, shift, rows, columns);
          }
        }
      }
    }
  }
  checks.section("ColumnRange", "all");
  CHECK(checks, ColumnRange{}.all());
  checks.section("ColumnRange", "listed");
  const Span of_rows[] = {{0, 2}, {2, 2}, {1, 4}};
  ColumnRange listed;
  listed.listed = true, listed.of_rows = of_rows;
  CHECK(checks, !listed.all());
  for (int row = 0; row < 3; ++row)
    CHECK(checks, listed.begin(row) == of_rows[row].begin && listed.end(row, 4) == of_rows[row].end, row);
  CHECK(checks, !(ColumnRange{0, kNone, 0}.all()));
  CHECK(checks, !(ColumnRange{kNone, 0, 0}.all()));
  checks.section("ColumnRange", "more than 2^31 columns");
  constexpr std::int64_t kMany = std::int64_t(1) << 40;
  const ColumnRange causal{kNone, 0, kMany - 4}, window{5, 5, kMany - 4};
  CHECK(checks, causal.begin(3) == 0 && causal.end(3, kMany) == kMany && causal.end(0, kMany) == kMany - 3);
  CHECK(checks, window.begin(0) == kMany - 9 && window.end(0, kMany) == kMany);
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  monoidreduce::test::Checks checks;
  monoidreduce::test::check_scores<float>(checks);
  monoidreduce::test::check_scores<double>(checks);
  monoidreduce::test::check_ranges(checks);
  return checks.finish();
}
