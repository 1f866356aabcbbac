// Losses between two distributions given by two scores an element: the student's (score) and the teacher's (other). Each is an
// expectation under one of the two, Q, whose state is a LogWSum, and takes log-sum-exps; that of the other, P, is a LogSumExp.
// With p and q for scores:
//   cross entropy  -sum Q log P            = lse_p - E_Q[p]                Q is the teacher's
//   forward KL      sum Q (log Q - log P)  = E_Q[q - p] - lse_q + lse_p    Q is the teacher's
//   reverse KL      the same                                               Q is the student's
// The difference q - p is taken before it is summed, so a student close to its teacher loses no digits.
#pragma once

#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/monoids/weighted_sum.h"

namespace monoidreduce {

enum class DistillationLoss : int { kCrossEntropy = 0, kForwardKL = 1, kReverseKL = 2 };

// The same for every loss.
template <class R>
struct DistillationFrame {
  R p, q;
};
template <class R>
struct DistillationState {
  typename LogSumExp<R>::State p;
  typename LogWSum<R>::State q;  // with the expectation, as the mean
};
template <class R>
struct DistillationOutput {
  LogNumber<R> p_lse, q_lse;
  R expectation, loss;  // backward reads all but the loss
};

// What the losses differ in.
template <class R, DistillationLoss kLoss>
struct DistillationRule {
  static constexpr bool kIsKL = kLoss != DistillationLoss::kCrossEntropy;
  static constexpr bool kUnderTeacher = kLoss != DistillationLoss::kReverseKL;

  // An element with p's score first, and with q's, beside what the expectation is of.
  MR_HD static Element<R> of_p(Element<R> e) {
    return kUnderTeacher ? e : Element<R>{e.other, e.score, e.column, e.label};
  }
  MR_HD static Element<R> of_q(Element<R> e) {
    e = of_p(e);
    return {e.other, kIsKL ? e.other - e.score : e.score, e.column, e.label};
  }
  // The frames are subtracted before the logarithms are added: their difference is exact where it is small.
  template <class State>
  MR_HD static R loss(State p, State q, R expectation) {
    if constexpr (!kIsKL) return (p.frame - expectation) + log(p.mass);
    return kUnderTeacher ? expectation + log_ratio(p, q) : expectation - log_ratio(q, p);
  }
  template <class State>
  MR_HD static R log_ratio(State a, State b) {
    return (a.frame - b.frame) + log(a.mass / b.mass);
  }
  // p, q: an element's shares. centred: what the expectation is of, less the expectation.
  MR_HD static Gradient<R> gradient(R p, R q, R centred, R g) {
    const R by_p = g * (p - q), by_q = (kIsKL ? g : -g) * q * centred;
    return kUnderTeacher ? Gradient<R>{by_p, by_q} : Gradient<R>{by_q, by_p};
  }
};

template <class R, DistillationLoss kLoss>
struct Distillation {
  LogSumExp<R> p;
  LogWSum<R> q;
  using Rule = DistillationRule<R, kLoss>;
  using Real = R;
  using Frame = DistillationFrame<R>;
  using State = DistillationState<R>;
  using Output = DistillationOutput<R>;
  using Upstream = R;  // gradient by loss(output)
  static constexpr int kScores = 2;
  MR_HD State identity() const { return {p.identity(), q.identity()}; }
  MR_HD State lift(Element<R> e) const { return accumulate(reframe(identity(), frame(e)), e); }
  MR_HD Output project(State s) const {
    const auto [q_lse, expectation] = q.project(s.q);
    const R loss = Rule::loss(s.p, s.q.softmax, expectation);
    return {p.project(s.p), q_lse, expectation, select(s.q.softmax.mass == R(0), R(0), loss)};
  }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output of, R g) const {
    const R p_share = p.share(Rule::of_p(e), of.p_lse), q_share = q.softmax.share(Rule::of_q(e), of.q_lse);
    return Rule::gradient(p_share, q_share, Rule::of_q(e).other - of.expectation, g);
  }

  // Measured from +inf all of a row is NaN, as of torch's log_softmax.
  MR_HD Frame frame(Element<R> e) const { return {Rule::of_p(e).score, Rule::of_q(e).score}; }
  MR_HD Frame frame_of(State s) const { return {p.frame_of(s.p), q.frame_of(s.q)}; }
  MR_HD Frame join(Frame f, Frame g) const { return {p.join(f.p, g.p), q.join(f.q, g.q)}; }
  MR_HD State reframe(State s, Frame f) const { return {p.reframe(s.p, f.p), q.reframe(s.q, f.q)}; }
  MR_HD State add(State a, State b) const { return {p.add(a.p, b.p), q.add(a.q, b.q)}; }
  MR_HD State accumulate(State s, Element<R> e) const {
    return {p.accumulate(s.p, Rule::of_p(e)), q.accumulate(s.q, Rule::of_q(e))};
  }
};

// The monoid of the loss that `kind` names, for loops over elements (with_named). Of what else a fold asks for, the frame of an
// element and the projection are not the same for all.
template <class R>
struct NamedDistillation : Distillation<R, DistillationLoss::kForwardKL> {
  using State = DistillationState<R>;
  using Output = DistillationOutput<R>;
  using Frame = DistillationFrame<R>;
  DistillationLoss kind;

#ifdef __CUDACC__
#pragma nv_exec_check_disable  // f may be of the host alone, which chooses kernels with it
#endif
  template <class F>
  MR_HD void with_named(F&& f) const {
    using enum DistillationLoss;
    if (kind == kCrossEntropy) return f(Distillation<R, kCrossEntropy>{});
    if (kind == kForwardKL) return f(Distillation<R, kForwardKL>{});
    f(Distillation<R, kReverseKL>{});
  }
  MR_HD Frame frame(Element<R> e) const {
    return kind == DistillationLoss::kReverseKL ? Frame{e.other, e.score} : Frame{e.score, e.other};
  }
  MR_HD Output project(State s) const {
    Output p;
    with_named([&](const auto& m) { p = m.project(s); });
    return p;
  }
};

}  // namespace monoidreduce
