// The statistics of a row's log-probabilities in one fold: the log-sum-exp, the target's score and the entropy of the
// softmax. Scores are first multiplied by the row's factor, its inverse temperature.
//
// TopLogProbs also finds the column of the largest score. That score is the frame, so its state has only an index more.
#pragma once

#include "monoidreduce/monoids/cross_entropy.h"
#include "monoidreduce/monoids/entropy.h"

namespace monoidreduce {

template <class R>
struct LogProbsStatistics {
  LogNumber<R> lse;
  R target, entropy;
  Index<R> top;  // -1: there is none, or it was not asked for
};
// The gradients with respect to the log-sum-exp, the target's score and the entropy.
template <class R>
struct LogProbsUpstream {
  R lse, target, entropy;
};

template <class R>
struct LogProbsState {
  typename LogSumExp<R>::State softmax;
  R sum, target;
};

// The formulas for temperatures and gradients, shared by the monoids below and the kernels.
template <class R>
struct LogProbsRule {
  // The element with its score at the row's temperature. The + 0 keeps the compiler from fusing the product with a later
  // subtraction, so forward and backward see the same rounded score.
  MR_HD static Element<R> tempered(Element<R> e) {
    e.score = multiply_add(e.score, e.factor, R(0));
    return e;
  }
  // The state measured from another frame. softmax is already there; every weight was multiplied by `kept`.
  MR_HD static LogProbsState<R> moved(LogProbsState<R> s, typename LogSumExp<R>::State softmax, R kept) {
    const R sum = Entropy<R>::moved(s.sum, kept, softmax.mass, raised(s.softmax.frame, softmax.frame));
    return {softmax, select(softmax.mass == R(0), R(0), sum), s.target};
  }
  // The derivative with respect to the raw score of the tempered element t; share is its softmax probability. Inlined into a
  // kernel, the factors that all elements of a row have in common are computed once, and score - lse once for the
  // probability and its logarithm.
  MR_HD static Gradient<R> gradient(Element<R> t, R share, LogProbsStatistics<R> p, LogProbsUpstream<R> g) {
    const R of_log = t.factor * (g.entropy * unit_of_scores<R>());
    const R of_share = t.factor * g.lse - p.entropy * of_log;
    const R log_share =
        Entropy<R>::finite(t.score - LogNumber<R>{LogSumExp<R>::origin(p.lse.high), p.lse.low});
    return {share * (of_share - log_share * of_log) + hit(t, t.factor * g.target), R(0)};
  }
};

template <class R>
struct LogProbs {
  LogSumExp<R> softmax;
  using Rule = LogProbsRule<R>;
  using Real = R;
  using Frame = R;
  using State = LogProbsState<R>;
  using Output = LogProbsStatistics<R>;
  using Upstream = LogProbsUpstream<R>;
  static constexpr int kScores = 1;
  static constexpr bool kMonotone = true;
  MR_HD State identity() const { return {softmax.identity(), R(0), R(-0.f)}; }
  MR_HD State lift(Element<R> e) const { return accumulate(reframe(identity(), frame(e)), e); }
  MR_HD Output project(State s) const {
    return {softmax.project(s.softmax), s.target, Entropy<R>::of(s.softmax.mass, s.sum), Index<R>(-1)};
  }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output p, Upstream g) const {
    return Rule::gradient(Rule::tempered(e), softmax.share(Rule::tempered(e), p.lse), p, g);
  }
  MR_HD R frame(Element<R> e) const { return softmax.frame(Rule::tempered(e)); }
  MR_HD R frame_of(State s) const { return s.softmax.frame; }
  MR_HD R join(R f, R g) const { return softmax.join(f, g); }
  MR_HD State reframe(State s, R f) const {
    return Rule::moved(s, softmax.reframe(s.softmax, f), softmax.rescale(s.softmax.frame, f));
  }
  MR_HD State add(State a, State b) const {
    return {softmax.add(a.softmax, b.softmax), a.sum + b.sum, a.target + b.target};
  }
  MR_HD State accumulate(State s, Element<R> e) const {
    const Element<R> t = Rule::tempered(e);
    const R gap = t.score - softmax.origin(s.softmax.frame), w = exp(gap);
    return {{s.softmax.frame, s.softmax.mass + w},
            s.sum + w * Entropy<R>::finite(gap),
            s.target + hit(t, t.score)};
  }
};

// A row that holds NaN has no largest score: top is -1.
template <class R>
struct TopLogProbs : LogProbs<R> {
  using Base = LogProbs<R>;
  struct State {
    typename Base::State all;
    Index<R> top;  // the lowest column whose score equals the frame
  };
  using Output = LogProbsStatistics<R>;
  static constexpr bool kReadsColumns = true;
  static constexpr auto kNone = std::numeric_limits<Index<Scalar<R>>>::max();  // larger than every column
  MR_HD static Index<R> least(Index<R> a, Index<R> b) { return select(b < a, b, a); }

  MR_HD State identity() const { return {Base::identity(), Index<R>(kNone)}; }
  MR_HD State lift(Element<R> e) const { return accumulate(reframe(identity(), this->frame(e)), e); }
  MR_HD Index<R> top(State s) const {
    const R mass = s.all.softmax.mass;
    return select((s.top == Index<R>(kNone)) | (mass != mass), Index<R>(-1), s.top);
  }
  MR_HD Output project(State s) const {
    Output p = Base::project(s.all);
    p.top = top(s);
    return p;
  }
  MR_HD R frame_of(State s) const { return Base::frame_of(s.all); }
  MR_HD State reframe(State s, R f) const {
    return {Base::reframe(s.all, f), select(f == frame_of(s), s.top, Index<R>(kNone))};
  }
  MR_HD State add(State a, State b) const { return {Base::add(a.all, b.all), least(a.top, b.top)}; }
  MR_HD State accumulate(State s, Element<R> e) const {
    const Index<R> here = select(this->frame(e) == frame_of(s), e.column, Index<R>(kNone));
    return {Base::accumulate(s.all, e), least(s.top, here)};
  }
};

}  // namespace monoidreduce
