// The sum of an activation of the scores; with a payload it is the two-layer MLP. Its frame is an empty type, so the
// compiler removes all code that deals with frames.
#pragma once

#include "monoidreduce/activation.h"
#include "monoidreduce/monoid.h"

namespace monoidreduce {

// State and frame have the same types for every activation.
template <class R>
struct SumState {
  R mass;
};
struct NoFrame {};

template <class R, class Activation = Identity>
struct Sum {
  using Real = R;
  using State = SumState<R>;
  using Frame = NoFrame;
  using Output = R;
  using Upstream = R;
  static constexpr int kScores = 1;
  static constexpr bool kNormalized = false;
  MR_HD State identity() const { return {R(-0.f)}; }  // adding -0 changes nothing, not even the sign of -0
  MR_HD State lift(Element<R> e) const { return {Activation::value(e.score)}; }
  MR_HD R project(State s) const { return s.mass; }
  MR_HD Gradient<R> local_gradient(Element<R> e, R, R g) const {
    return {g * Activation::derivative(e.score), R(0)};
  }

  MR_HD Frame frame(Element<R>) const { return {}; }
  MR_HD Frame frame_of(State) const { return {}; }
  MR_HD Frame join(Frame, Frame) const { return {}; }
  MR_HD State reframe(State s, Frame) const { return s; }
  MR_HD State add(State a, State b) const { return {a.mass + b.mass}; }
  MR_HD State accumulate(State s, Element<R> e) const { return {s.mass + Activation::value(e.score)}; }

  MR_HD R rescale(Frame, Frame) const { return R(1); }
  MR_HD R weight(Element<R> e, Frame) const { return Activation::value(e.score); }
  MR_HD R share(Element<R> e, R) const { return value_beside_derivative<Activation>(e.score); }
  MR_HD R mass(State s) const { return s.mass; }
};

// The sum of the activation that `kind` selects at run time. Loops over elements are compiled once per activation
// (with_named). No other member depends on the activation, so they are inherited.
template <class R>
struct NamedSum : Sum<R> {
  ActivationKind kind;

  template <class F>
  MR_HD void with_named(F&& f) const {
    with_activation(kind, [&](auto activation) { f(Sum<R, decltype(activation)>{}); });
  }
};

}  // namespace monoidreduce
