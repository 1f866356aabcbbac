// The weighted mean of a scalar, and the total weight. An element's first score is its weight, its second score the value.
// WSum takes weights as they are. LogWSum takes their logarithms: it is softmax attention with scalar values.
// WithPayload<LogSumExp, D> is LogWSum with vectors.
#pragma once

#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce {

// The mean is 0 if the total weight is 0.
template <class R>
MR_HD R mean_of(R sum, R weight) {
  return select(weight == R(0), R(0), sum / weight);
}

template <class R>
struct WSum {
  using Real = R;
  struct State {
    R weight, sum;
  };
  struct Output {
    R weight, mean;
  };
  using Upstream = Output;
  static constexpr int kScores = 2;
  MR_HD State identity() const { return {R(-0.f), R(-0.f)}; }
  MR_HD State lift(Element<R> e) const { return {e.score, e.score * e.other}; }
  MR_HD State combine(State a, State b) const { return {a.weight + b.weight, a.sum + b.sum}; }
  MR_HD Output project(State s) const { return {s.weight, mean_of(s.sum, s.weight)}; }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output p, Upstream g) const {
    const R slope = select(p.weight == R(0), R(0), g.mean / p.weight);
    return {g.weight + slope * (e.other - p.mean), slope * e.score};
  }
};

// The natural logarithm of the total weight, and the mean; or the gradients with respect to these two.
template <class Lse, class R>
struct LogWeightedMean {
  Lse lse;
  R mean;
};

template <class R>
struct LogWSum {
  LogSumExp<R> softmax;
  using Real = R;
  using Frame = R;
  struct State {
    typename LogSumExp<R>::State softmax;
    R sum;  // sum of weight * value, with weights in the frame of softmax
  };
  using Output = LogWeightedMean<LogNumber<R>, R>;
  using Upstream = LogWeightedMean<R, R>;
  static constexpr int kScores = 2;
  static constexpr bool kMonotone = true;
  MR_HD State identity() const { return {softmax.identity(), R(-0.f)}; }
  MR_HD State lift(Element<R> e) const { return {softmax.lift(e), softmax.weight(e, frame(e)) * e.other}; }
  MR_HD Output project(State s) const { return {softmax.project(s.softmax), mean_of(s.sum, s.softmax.mass)}; }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output p, Upstream g) const {
    const R share = softmax.share(e, p.lse);
    return {share * (g.lse + g.mean * (e.other - p.mean)), share * g.mean};
  }

  MR_HD R frame(Element<R> e) const { return softmax.frame(e); }
  MR_HD R frame_of(State s) const { return s.softmax.frame; }
  MR_HD R join(R f, R g) const { return softmax.join(f, g); }
  MR_HD State reframe(State s, R f) const {
    return {softmax.reframe(s.softmax, f), s.sum * softmax.rescale(s.softmax.frame, f)};
  }
  MR_HD State add(State a, State b) const { return {softmax.add(a.softmax, b.softmax), a.sum + b.sum}; }
  MR_HD State accumulate(State s, Element<R> e) const {
    const R weight = softmax.weight(e, s.softmax.frame);
    return {{s.softmax.frame, s.softmax.mass + weight}, s.sum + weight * e.other};
  }
};

}  // namespace monoidreduce
