// LogSumExp, the monoid of online softmax: attention, cross entropy, logsumexp_matmul. A state (frame, mass) stands for
// the number mass * e^frame; the output is its logarithm.
#pragma once

#include "monoidreduce/monoid.h"

namespace monoidreduce {

// A logarithm in two words (a double-float), high + low. high is the rounded logarithm, which callers see; low is its
// rounding error. Without low, half a unit in the last place of a float lse of 600 is a relative error of 3e-5 in every
// probability.
template <class R>
struct LogNumber {
  R high, low;
};

// a + b and its rounding error (Knuth's two-sum, valid whichever is larger). The error is 0 where the sum is infinite.
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

// e^(x - high - low). Rounding each of the two differences would cost a relative error of up to 2.4e-7 in a result of e^-4 to
// e^-8. So the rounding errors are added back (Dekker's fast two-sum); they are exact if |x| <= |high|, or if x and high are
// close.
template <class R>
MR_HD R exp_of_difference(R x, R high, R low) {
  const R above = x - high, d = above - low;
  return exp(d, (x - (above + high)) + ((above - d) - low));
}

// x, rounded to two words of another type.
template <class T, class R>
MR_HD LogNumber<T> rounded(LogNumber<R> x) {
  const T high = T(x.high), lost = T(x.high - R(high));
  return {high, select(high == infinity<T>() || high == -infinity<T>(), T(0), lost + T(x.low))};
}

// The log-sum-exp from which backward recomputes the softmax probabilities, exp(score - lse). A +inf score makes an
// attention output NaN, and so the row's centre (g_lse - delta). All probabilities must then be NaN, as in torch's softmax.
// logsumexp_matmul has no payload, so such a score leaves its centre, g_lse, as it is, and lse = +inf is kept.
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
  static constexpr bool kNormalized = true, kMonotone = true;
  struct State {
    R frame, mass;
  };
  MR_HD State identity() const { return {-infinity<R>(), R(0)}; }
  MR_HD State lift(Element<R> e) const { return {frame(e), weight(e, frame(e))}; }
  MR_HD Output project(State s) const { return LogNumber<R>{s.frame, R(0)} + log_number(s.mass); }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output lse, R g) const { return {g * share(e, lse), R(0)}; }

  // A frame is never +inf, because inf - inf is NaN. Measured from the largest finite number instead, a +inf score has weight
  // +inf and all others have weight 0.
  MR_HD R frame(Element<R> e) const { return select(e.score == infinity<R>(), largest<R>(), e.score); }
  MR_HD R frame_of(State s) const { return s.frame; }
  MR_HD R join(R f, R g) const { return max(g, f); }
  MR_HD State reframe(State s, R f) const { return {f, s.mass * rescale(s.frame, f)}; }
  // The state if every score is shifted, and the frame with them: the mass stays.
  MR_HD State measured_from(State s, R f) const { return {f, s.mass}; }
  MR_HD State add(State a, State b) const { return {a.frame, a.mass + b.mass}; }
  MR_HD State accumulate(State s, Element<R> e) const { return {s.frame, s.mass + weight(e, s.frame)}; }

  MR_HD R rescale(R from, R to) const { return exp(from - origin(to)); }
  MR_HD R weight(Element<R> e, R f) const { return exp(e.score - origin(f)); }
  MR_HD R share(Element<R> e, Output p) const { return exp_of_difference(e.score, origin(p.high), p.low); }
  MR_HD R mass(State s) const { return s.mass; }
  MR_HD R absent() const { return -infinity<R>(); }  // the score of an element without weight
  // (-inf) - (-inf) is NaN. So where the frame is still -inf, scores are measured from 0: all weights are exp(-inf) = 0.
  MR_HD static R origin(R f) { return select(f == -infinity<R>(), R(0), f); }
};

// By how much scores become smaller when they are measured from the frame `to` instead of `from`.
template <class R>
MR_HD R raised(R from, R to) {
  return LogSumExp<R>::origin(to) - LogSumExp<R>::origin(from);
}

}  // namespace monoidreduce
