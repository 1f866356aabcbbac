// The statistics of cross entropy against class indices in one fold: log-sum-exp, the target's score, and the
// sum of all scores (label smoothing). A loss made of them, with a z-loss, is a function of the row
// (CrossEntropyLoss), not another monoid.
#pragma once

#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce {

// The three, as states, as numbers of a row, and as gradients by those.
template <class Lse, class R>
struct ClassStatistics {
  Lse lse;
  R target, sum;
};

// kWithSum: is the sum wanted; without it the sum is 0.
template <class R, bool kWithSum = true>
struct CrossEntropy {
  LogSumExp<R> softmax;
  using Real = R;
  using Frame = R;
  using State = ClassStatistics<typename LogSumExp<R>::State, R>;
  using Output = ClassStatistics<LogNumber<R>, R>;
  using Upstream = ClassStatistics<R, R>;
  static constexpr int kScores = 1;
  MR_HD State identity() const { return {softmax.identity(), R(-0.f), R(-0.f)}; }
  MR_HD State lift(Element<R> e) const { return {softmax.lift(e), hit(e, e.score), summand(e)}; }
  MR_HD Output project(State s) const { return {softmax.project(s.lse), s.target, s.sum}; }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output p, Upstream g) const {
    return {g.lse * softmax.share(e, p.lse) + (hit(e, g.target) + g.sum), R(0)};
  }

  MR_HD R frame(Element<R> e) const { return softmax.frame(e); }
  MR_HD R frame_of(State s) const { return s.lse.frame; }
  MR_HD R join(R f, R g) const { return softmax.join(f, g); }
  MR_HD State reframe(State s, R f) const { return {softmax.reframe(s.lse, f), s.target, s.sum}; }
  MR_HD State add(State a, State b) const {
    return {softmax.add(a.lse, b.lse), a.target + b.target, a.sum + b.sum};
  }
  MR_HD State accumulate(State s, Element<R> e) const {
    return {softmax.accumulate(s.lse, e), s.target + hit(e, e.score), s.sum + summand(e)};
  }
  MR_HD static R summand(Element<R> e) { return kWithSum ? e.score : R(-0.f); }
  // x in the target's column, -0 (which adds nothing, not even a sign) elsewhere.
  MR_HD static R hit(Element<R> e, R x) { return select(e.column == e.label, x, R(-0.f)); }
};

// loss = (1 - smoothing) (lse - target) + smoothing (lse - sum / columns) + z_loss lse^2, for one row.
// Natural units.
template <class T>
struct CrossEntropyLoss {
  T smoothing, z_loss, columns;
  using Output = typename CrossEntropy<T>::Output;
  using Upstream = typename CrossEntropy<T>::Upstream;
  // The low word is added to the difference, where it is not lost again.
  MR_HD T value(Output p) const {
    const T picked =
        (T(1) - smoothing) * p.target + (smoothing == T(0) ? T(0) : smoothing * (p.sum / columns));
    return (p.lse.high - picked) + p.lse.low + (z_loss == T(0) ? T(0) : z_loss * p.lse.high * p.lse.high);
  }
  // The gradient by the statistics, from those by the loss and by the returned lse.
  MR_HD Upstream upstream(T lse, T g_loss, T g_lse) const {
    return {g_loss * (T(1) + (z_loss == T(0) ? T(0) : T(2) * z_loss * lse)) + g_lse,
            -g_loss * (T(1) - smoothing), -g_loss * smoothing / columns};
  }
};

}  // namespace monoidreduce
