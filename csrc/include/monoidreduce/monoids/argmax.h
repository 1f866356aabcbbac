// ArgMax: the largest score, and the lowest column that has it. NaN counts as the largest score, as in torch. An empty
// fold has value -inf and column -1. The monoid has no frame, because its state has no additive mass.
#pragma once

#include "monoidreduce/monoid.h"

namespace monoidreduce {

template <class R>
struct ArgMax {
  using Real = R;
  struct State {
    R value;
    Index<R> column;
  };
  using Output = State;
  using Upstream = R;  // the gradient of the value; the column has none
  static constexpr int kScores = 1;
  // Larger than every column index, so that a real score of -inf still wins over the identity.
  static constexpr auto kNone = std::numeric_limits<Index<Scalar<R>>>::max();
  MR_HD State identity() const { return {-infinity<R>(), Index<R>(kNone)}; }
  MR_HD State lift(Element<R> e) const { return {e.score, e.column}; }
  MR_HD State combine(State a, State b) const {
    const Mask<R> tie = (a.value == b.value) | ((a.value != a.value) & (b.value != b.value));
    const Mask<R> larger = (b.value > a.value) | ((b.value != b.value) & (a.value == a.value));
    const Mask<R> take_b = larger | (tie & (b.column < a.column));
    return {select(take_b, b.value, a.value), select(take_b, b.column, a.column)};
  }
  MR_HD Output project(State s) const {
    return {s.value, select(s.column == Index<R>(kNone), Index<R>(-1), s.column)};
  }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output p, R g) const {
    return {select(e.column == p.column, g, R(0)), R(0)};
  }
};

}  // namespace monoidreduce
