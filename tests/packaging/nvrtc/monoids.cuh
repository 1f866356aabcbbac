// Monoids that the library does not have, as a user would write them, for test_nvrtc.py.
#pragma once

#include "monoidreduce/monoid.h"

namespace user {

using monoidreduce::abs, monoidreduce::exp, monoidreduce::log, monoidreduce::max;
using monoidreduce::Element, monoidreduce::Gradient, monoidreduce::Scalar, monoidreduce::infinity,
    monoidreduce::select;

// The log-mean-exp of examples/cpp/log_mean_exp.cpp, whose weights a payload may have.
template <class R>
struct LogMeanExp {
  Scalar<R> temperature;
  using Real = R;
  using Frame = R;  // the largest score so far
  struct Output {
    R value, count;
  };
  using Upstream = R;
  static constexpr int kScores = 1;
  static constexpr bool kNormalized = true, kMonotone = true;
  struct State {
    R frame, mass, count;
  };
  MR_HD State identity() const { return {-infinity<R>(), R(0), R(0)}; }
  MR_HD State lift(Element<R> e) const { return {e.score, weight(e, e.score), R(1)}; }
  MR_HD Output project(State s) const {
    const R value = s.frame + R(temperature) * log(s.mass / s.count);
    return {select(s.count == R(0), -infinity<R>(), value), s.count};
  }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output p, R g) const {
    return {g * share(e, p) / p.count, R(0)};
  }

  MR_HD R frame(Element<R> e) const { return e.score; }
  MR_HD R frame_of(State s) const { return s.frame; }
  MR_HD R join(R f, R g) const { return max(g, f); }
  MR_HD State reframe(State s, R f) const { return {f, s.mass * rescale(s.frame, f), s.count}; }
  MR_HD State add(State a, State b) const { return {a.frame, a.mass + b.mass, a.count + b.count}; }
  MR_HD State accumulate(State s, Element<R> e) const {
    return {s.frame, s.mass + weight(e, s.frame), s.count + R(1)};
  }

  MR_HD R rescale(R from, R to) const {
    return exp((from - select(to == -infinity<R>(), R(0), to)) / R(temperature));
  }
  MR_HD R weight(Element<R> e, R f) const { return rescale(e.score, f); }
  MR_HD R share(Element<R> e, Output p) const { return rescale(e.score, p.value); }
  MR_HD R mass(State s) const { return s.mass; }
  MR_HD R absent() const { return -infinity<R>(); }
};

// Squared scores: weights without a frame, as of an attention that is not a softmax.
template <class R>
struct Squares {
  using Real = R;
  struct Frame {};
  using Output = R;
  using Upstream = R;
  static constexpr int kScores = 1;
  static constexpr bool kNormalized = false;
  struct State {
    R mass;
  };
  MR_HD State identity() const { return {R(-0.f)}; }
  MR_HD State lift(Element<R> e) const { return {weight(e, {})}; }
  MR_HD R project(State s) const { return s.mass; }
  MR_HD Gradient<R> local_gradient(Element<R> e, R, R g) const { return {R(2) * g * e.score, R(0)}; }

  MR_HD Frame frame(Element<R>) const { return {}; }
  MR_HD Frame frame_of(State) const { return {}; }
  MR_HD Frame join(Frame, Frame) const { return {}; }
  MR_HD State reframe(State s, Frame) const { return s; }
  MR_HD State add(State a, State b) const { return {a.mass + b.mass}; }
  MR_HD State accumulate(State s, Element<R> e) const { return {s.mass + weight(e, {})}; }

  MR_HD R rescale(Frame, Frame) const { return R(1); }
  MR_HD R weight(Element<R> e, Frame) const { return e.score * e.score; }
  MR_HD R share(Element<R> e, R) const { return weight(e, {}); }
  MR_HD R mass(State s) const { return s.mass; }
};

// The noisy-or of tests/consumer/noisy_or.cpp, which has no frame.
template <class R>
struct NoisyOr {
  using Real = R;
  using Output = R;
  using Upstream = R;
  static constexpr int kScores = 1;
  struct State {
    R log_none;
  };
  MR_HD State identity() const { return {R(-0.f)}; }
  MR_HD State lift(Element<R> e) const { return {-max(e.score, R(0)) - log(R(1) + exp(-abs(e.score)))}; }
  MR_HD State combine(State a, State b) const { return {a.log_none + b.log_none}; }
  MR_HD R project(State s) const { return R(1) - exp(s.log_none); }
  MR_HD Gradient<R> local_gradient(Element<R> e, R p, R g) const {
    return {g * (R(1) - p) / (R(1) + exp(-e.score)), R(0)};
  }
};

}  // namespace user
