// The statistics of cross entropy with class indices, in one fold: the log-sum-exp, the target's score, and the mean of
// all scores (for label smoothing). The loss, with its z-loss, is a function of a row's statistics (CrossEntropyLoss),
// not another monoid.
#pragma once

#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce {

// The mean of the scores may be weighted. count is then the sum of the weights, otherwise the number of scores. That number
// is an integer, so the compiler can add a tile's length at once.
template <class R, class Count = Index<R>>
struct ClassState {
  typename LogSumExp<R>::State lse;
  R target;
  R sum;  // the weighted sum of all scores, each measured from the frame of lse
  Count count;
};
template <class R>
struct ClassStatistics {
  LogNumber<R> lse;
  R target;
  LogNumber<R> mean;  // in two words like lse: lse - mean may be small where both are large
  R count;
};
// The gradients with respect to the log-sum-exp, the target's score, and the sum of all scores.
template <class R>
struct ClassUpstream {
  R lse, target, sum;
};

// x in the target's column, otherwise -0, the neutral element of addition (x + -0 keeps the sign of a zero x).
template <class R>
MR_HD R hit(const Element<R>& e, R x) {
  return select(e.column == e.label, x, R(-0.f));
}

// How the mean of the scores weighs classes: all equally, not at all, or by class weights. weigh(e, x) is x times the
// weight of e's class.
template <class R>
struct EqualClasses : LogSumExp<R> {
  using Count = Index<R>;
  MR_HD static R weigh(const Element<R>&, R x) { return x; }
  MR_HD static Count count(const Element<R>&) { return Count(1); }
};
template <class R>
struct NoClasses : LogSumExp<R> {
  using Count = Index<R>;
  MR_HD static R weigh(const Element<R>&, R) { return R(-0.f); }
  MR_HD static Count count(const Element<R>&) { return Count(0); }
};
template <class R>
struct WeightedClasses : LogSumExp<R> {
  const Scalar<R>* weight;  // [columns], padded to whole tiles: kernels also read it beyond the last column
  using Count = R;
  MR_HD R weigh(const Element<R>& e, R x) const { return count(e) * x; }
  MR_HD R count(const Element<R>& e) const { return R(weight[first_lane(e.column)]); }
};

template <class R, template <class> class Classes>
struct ClassFold {
  Classes<R> softmax;
  using Real = R;
  using Frame = R;
  using State = ClassState<R, typename Classes<R>::Count>;
  using Output = ClassStatistics<R>;
  using Upstream = ClassUpstream<R>;
  static constexpr int kScores = 1;
  static constexpr bool kMonotone = true;
  MR_HD State identity() const { return {softmax.identity(), R(-0.f), R(0), typename Classes<R>::Count(0)}; }
  MR_HD State lift(Element<R> e) const { return accumulate(reframe(identity(), frame(e)), e); }
  MR_HD Output project(State s) const {
    const R count = R(s.count), mean = select(count == R(0), s.sum, s.sum / count);  // 0 scores: 0, or NaN
    return {softmax.project(s.lse), s.target, two_sum(softmax.origin(s.lse.frame), mean), count};
  }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output p, Upstream g) const {
    return {g.lse * softmax.share(e, p.lse) + (hit(e, g.target) + softmax.weigh(e, g.sum)), R(0)};
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
    const R above = softmax.weigh(e, e.score - softmax.origin(s.lse.frame));
    return {softmax.accumulate(s.lse, e), s.target + hit(e, e.score), s.sum + above,
            s.count + softmax.count(e)};
  }
  // The weighted sum of lse - score.
  MR_HD R below(State s) const { return R(s.count) * log(s.lse.mass) - s.sum; }
};

template <class R>
struct CrossEntropy : ClassFold<R, EqualClasses> {};
// Without label smoothing: the mean is not needed, and is 0.
template <class R>
struct HardCrossEntropy : ClassFold<R, NoClasses> {};
// With label smoothing and class weights.
template <class R>
struct WeightedCrossEntropy : ClassFold<R, WeightedClasses> {
  static constexpr bool kReadsColumns = true;
};
// A state's statistics. The overload follows from the type of the count: a number of scores, or a sum of weights.
template <class R>
MR_HD ClassStatistics<R> class_statistics(const ClassState<R, Index<R>>& s) {
  return CrossEntropy<R>{}.project(s);
}
template <class R>
MR_HD ClassStatistics<R> class_statistics(const ClassState<R, R>& s) {
  return WeightedCrossEntropy<R>{}.project(s);
}

// The weights of a row: the weight of its target, and the mean weight of all classes.
template <class T>
struct RowWeights {
  T target = T(1), mean = T(1);
};

// The loss of one row, in natural units:
//   loss = (1 - smoothing) w_target (lse - target) + smoothing / classes sum_c w_c (lse - x_c) + z_loss lse^2
// If only some of the classes were folded, the sum is over these. If the target is not among them, the first term is 0.
template <class T>
struct CrossEntropyLoss {
  T smoothing, z_loss;
  using Upstream = typename CrossEntropy<T>::Upstream;
  // The low words are added to differences of the high words, which are small enough not to absorb them.
  MR_HD T value(ClassStatistics<T> p, T classes, RowWeights<T> weights, bool has_target = true) const {
    const T hard = has_target ? weights.target * ((p.lse.high - p.target) + p.lse.low) : T(0);
    const T soft = (p.lse.high - p.mean.high) + (p.lse.low - p.mean.low);
    return (T(1) - smoothing) * hard + (smoothing == T(0) ? T(0) : smoothing * (p.count / classes) * soft) +
           (z_loss == T(0) ? T(0) : z_loss * p.lse.high * p.lse.high);
  }
  // The sum of the weights with which the classes' lse - x_c count in the loss.
  MR_HD T weight(T count, T classes, RowWeights<T> weights, bool has_target) const {
    const T hard = has_target ? weights.target : T(0);
    return (T(1) - smoothing) * hard + (smoothing == T(0) ? T(0) : smoothing * (count / classes));
  }
  // The gradients with respect to the statistics, from the gradients of the loss and of the returned lse. That of the sum
  // is for a class of weight 1.
  MR_HD Upstream upstream(T lse, T classes, RowWeights<T> weights, T g_loss, T g_lse) const {
    const T both = weights.target + smoothing * (weights.mean - weights.target);
    return {g_loss * (both + (z_loss == T(0) ? T(0) : T(2) * z_loss * lse)) + g_lse,
            -g_loss * (T(1) - smoothing) * weights.target, -g_loss * smoothing / classes};
  }
};

}  // namespace monoidreduce
