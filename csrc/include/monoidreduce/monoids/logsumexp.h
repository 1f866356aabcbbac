// LogSumExp: softmax attention, cross entropy, logsumexp_matmul. The state is the number mass * e^frame, the
// output its logarithm.
#pragma once

#include "monoidreduce/monoid.h"

namespace monoidreduce {

// A logarithm in two words, high + low: high is the rounded one that callers see, low what it lost. Half a
// unit in the last place of 600, in float, is a relative error of 3e-5 in every probability made from it.
template <class R>
struct LogNumber {
  R high, low;
};

// a + b, and what rounding that sum lost (Knuth's two-sum: either of the two may be the larger): 0 where it is infinite.
template <class R>
MR_HD LogNumber<R> two_sum(R a, R b) {
  const R high = a + b, added = high - a, low = (a - (high - added)) + (b - added);
  return {high, select(abs(high) == infinity<R>(), R(0), low)};
}

template <class R>
MR_HD LogNumber<R> operator+(LogNumber<R> a, LogNumber<R> b) {
  const LogNumber<R> sum = two_sum(a.high, b.high);
  return {sum.high, sum.low + (a.low + b.low)};
}
template <class R>
MR_HD LogNumber<R> operator-(LogNumber<R> a) {
  return {-a.high, -a.low};
}
template <class R>
MR_HD LogNumber<R> operator-(LogNumber<R> a, LogNumber<R> b) {
  return a + -b;
}
template <class R>
MR_HD R operator-(R x, LogNumber<R> from) {
  return (x - from.high) - from.low;
}
template <class R>
MR_HD LogNumber<R> log_number(R mass) {
  return {log(mass), log_rest(mass)};
}

// e^(x - high - low). What rounding the two differences loses, each up to 2.4e-7 of a result of e^-4 to e^-8, is put back: all
// of it where |x| <= |high| or the two are near (Dekker's fast two-sum).
template <class R>
MR_HD R exp_of_difference(R x, R high, R low) {
  const R above = x - high, d = above - low;
  return exp(d, (x - (above + high)) + ((above - d) - low));
}

// x in two words of another type.
template <class T, class R>
MR_HD LogNumber<T> rounded(LogNumber<R> x) {
  const T high = T(x.high), lost = T(x.high - R(high));
  return {high, select(high == infinity<T>() || high == -infinity<T>(), T(0), lost + T(x.low))};
}

// The log-sum-exp that weights of an output are exp(score - it) of. centre: a row's, less <G_i, out_i>. Beside a +inf score
// the output is NaN, and the centre: so are then all weights, as softmax's. Those of a log-sum-exp alone are not.
template <class T>
MR_HD T softmax_product(T lse, T centre) {
  return lse == infinity<T>() && centre != centre ? centre : lse;
}

template <class R>
struct LogSumExp {
  using Real = R;
  using Frame = R;
  using Output = LogNumber<R>;  // natural logarithm of the sum; -inf for an empty fold
  using Upstream = R;
  static constexpr int kScores = 1;
  static constexpr bool kNormalized = true;
  struct State {
    R frame, mass;
  };
  MR_HD State identity() const { return {-infinity<R>(), R(0)}; }
  MR_HD State lift(Element<R> e) const { return {frame(e), weight(e, frame(e))}; }
  MR_HD Output project(State s) const { return LogNumber<R>{s.frame, R(0)} + log_number(s.mass); }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output lse, R g) const { return {g * share(e, lse), R(0)}; }

  // Never +inf, from which a score of +inf is NaN away: measured from the largest number it weighs +inf, all others 0.
  MR_HD R frame(Element<R> e) const { return select(e.score == infinity<R>(), largest<R>(), e.score); }
  MR_HD R frame_of(State s) const { return s.frame; }
  MR_HD R join(R f, R g) const { return max(g, f); }
  MR_HD State reframe(State s, R f) const { return {f, s.mass * rescale(s.frame, f)}; }
  MR_HD State add(State a, State b) const { return {a.frame, a.mass + b.mass}; }
  MR_HD State accumulate(State s, Element<R> e) const { return {s.frame, s.mass + weight(e, s.frame)}; }

  MR_HD R rescale(R from, R to) const { return exp(from - origin(to)); }
  MR_HD R weight(Element<R> e, R f) const { return exp(e.score - origin(f)); }
  MR_HD R share(Element<R> e, Output p) const { return exp_of_difference(e.score, origin(p.high), p.low); }
  MR_HD R mass(State s) const { return s.mass; }
  MR_HD R absent() const { return -infinity<R>(); }  // a score that adds nothing
  // (-inf) - (-inf) is NaN: an empty frame is measured from 0, so that all its weights are exp(-inf) = 0.
  MR_HD static R origin(R f) { return select(f == -infinity<R>(), R(0), f); }
  // By how much less scores are once they are measured from another frame.
  MR_HD static R raised(R from, R to) { return origin(to) - origin(from); }
};

}  // namespace monoidreduce
