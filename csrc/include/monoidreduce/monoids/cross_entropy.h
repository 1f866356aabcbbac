// The statistics of cross entropy with class indices, in one fold: the log-sum-exp, the target's score, and the mean of
// all scores (for label smoothing). The loss, with its z-loss, is a function of a row's statistics (CrossEntropyLoss),
// not another monoid.
#pragma once

#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce {

template <class R>
struct ClassState {
  typename LogSumExp<R>::State lse;
  R target;
  R sum;  // of all scores, each measured from the frame of lse
  Index<R>
      count;  // the number of scores in sum; an integer, so that a loop over a tile adds its length at once
};
template <class R>
struct ClassStatistics {
  LogNumber<R> lse;
  R target;
  LogNumber<R> mean;  // in two words like lse: lse - mean may be small where both are large
  Index<R> count;
};
// The gradients with respect to the log-sum-exp, the target's score, and the sum of all scores.
template <class R>
struct ClassUpstream {
  R lse, target, sum;
};

// x in the target's column, else -0, the neutral element of addition (x + -0 keeps the sign of a zero x).
template <class R>
MR_HD R hit(const Element<R>& e, R x) {
  return select(e.column == e.label, x, R(-0.f));
}

// The fold of them, by which scores the mean is of.
enum class ClassMean { kNone, kOfAll };

template <class R, ClassMean kMean>
struct ClassFold {
  static constexpr bool kWithSum = kMean != ClassMean::kNone;
  LogSumExp<R> softmax;
  using Real = R;
  using Frame = R;
  using State = ClassState<R>;
  using Output = ClassStatistics<R>;
  using Upstream = ClassUpstream<R>;
  static constexpr int kScores = 1;
  static constexpr bool kMonotone = true;
  MR_HD State identity() const { return {softmax.identity(), R(-0.f), R(0), Index<R>(0)}; }
  MR_HD State lift(Element<R> e) const { return accumulate(reframe(identity(), frame(e)), e); }
  MR_HD Output project(State s) const {
    const R mean = select(s.count == Index<R>(0), R(0), s.sum / R(s.count));
    return {softmax.project(s.lse), s.target, two_sum(softmax.origin(s.lse.frame), mean), s.count};
  }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output p, Upstream g) const {
    return {g.lse * softmax.share(e, p.lse) + (hit(e, g.target) + g.sum), R(0)};
  }
  MR_HD R frame(Element<R> e) const { return softmax.frame(e); }
  MR_HD R frame_of(State s) const { return s.lse.frame; }
  MR_HD R join(R f, R g) const { return softmax.join(f, g); }
  MR_HD State reframe(State s, R f) const {
    return {softmax.reframe(s.lse, f), s.target, s.sum - R(s.count) * raised(s.lse.frame, f), s.count};
  }
  MR_HD State add(State a, State b) const {
    return {softmax.add(a.lse, b.lse), a.target + b.target, a.sum + b.sum, a.count + b.count};
  }
  MR_HD State accumulate(State s, Element<R> e) const {
    const R above = kWithSum ? e.score - softmax.origin(s.lse.frame) : R(-0.f);
    return {softmax.accumulate(s.lse, e), s.target + hit(e, e.score), s.sum + above,
            s.count + Index<R>(kWithSum ? 1 : 0)};
  }
};

template <class R>
struct CrossEntropy : ClassFold<R, ClassMean::kOfAll> {};
// Without label smoothing. The mean is 0.
template <class R>
struct HardCrossEntropy : ClassFold<R, ClassMean::kNone> {};

// loss = (1 - smoothing) (lse - target) + smoothing (lse - mean) + z_loss lse^2, for one row. Natural units.
template <class T>
struct CrossEntropyLoss {
  T smoothing, z_loss;
  using Upstream = typename CrossEntropy<T>::Upstream;
  // The low words are added to differences of the high words, which are small enough not to absorb them.
  MR_HD T value(ClassStatistics<T> p) const {
    const T hard = (p.lse.high - p.target) + p.lse.low;
    const T soft = (p.lse.high - p.mean.high) + (p.lse.low - p.mean.low);
    return (T(1) - smoothing) * hard + (smoothing == T(0) ? T(0) : smoothing * soft) +
           (z_loss == T(0) ? T(0) : z_loss * p.lse.high * p.lse.high);
  }
  // The gradients of the statistics over so many columns, from those of the loss and of the returned lse.
  MR_HD Upstream upstream(T lse, T columns, T g_loss, T g_lse) const {
    return {g_loss * (T(1) + (z_loss == T(0) ? T(0) : T(2) * z_loss * lse)) + g_lse,
            -g_loss * (T(1) - smoothing), -g_loss * smoothing / columns};
  }
};

}  // namespace monoidreduce
