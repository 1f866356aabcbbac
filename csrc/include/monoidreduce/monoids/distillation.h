// Losses between two distributions over the columns. An element has two scores: the student's (score) and the teacher's
// (other). Each loss is an expectation under one of the two distributions, Q, relative to the other, P.
//
//   cross entropy  E_Q[-log P]            Q is the teacher's
//   forward KL     E_Q[log Q - log P]     Q is the teacher's
//   reverse KL     E_Q[log Q - log P]     Q is the student's
//
// The state of Q is a LogWSum, the state of P a LogSumExp.
//
// A constant added to all scores of a row changes no probability, but it may be large. So raw scores of student and teacher
// are never subtracted from each other: the fold first measures each from its own frame, backward from its own log-sum-exp.
#pragma once

#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/monoids/weighted_sum.h"

namespace monoidreduce {

enum class DistillationLoss : int { kCrossEntropy = 0, kForwardKL = 1, kReverseKL = 2 };
inline constexpr const char* kDistillationLossNames[] = {"cross_entropy", "forward_kl", "reverse_kl"};

// The types below are shared by all losses.
template <class R>
struct DistillationFrame {
  R p, q;
};
template <class R>
struct DistillationState {
  typename LogSumExp<R>::State p;
  typename LogWSum<R>::State q;  // its values are surplus() of the scores, measured from the frames
};
template <class R>
struct DistillationOutput {
  LogNumber<R> p_lse, q_lse;
  LogNumber<R> centre;  // p_lse - loss, as one number
  R loss;               // not read by backward
};

// Everything in which the three losses differ.
template <class R, DistillationLoss kLoss>
struct DistillationRule {
  static constexpr bool kIsKL = kLoss != DistillationLoss::kCrossEntropy;
  static constexpr bool kUnderTeacher = kLoss != DistillationLoss::kReverseKL;

  // The scores of an element under P and under Q.
  MR_HD static DistillationFrame<R> scores(Element<R> e) {
    return kUnderTeacher ? DistillationFrame<R>{e.score, e.other} : DistillationFrame<R>{e.other, e.score};
  }
  // The integrand of the expectation, from log Q and log P. It is linear, so it can be applied to parts of them.
  template <class T>
  MR_HD static T surplus(T q, T p) {
    return kIsKL ? q - p : -p;
  }
  // The element as the monoid of P (LogSumExp) and that of Q (LogWSum) take it. The value of LogWSum is the integrand,
  // with both scores measured from the frames f.
  MR_HD static Element<R> of_p(Element<R> e) { return {scores(e).p, R(0), e.column, e.label}; }
  MR_HD static Element<R> of_q(Element<R> e) { return {scores(e).q, R(0), e.column, e.label}; }
  MR_HD static Element<R> of_q(Element<R> e, DistillationFrame<R> f) {
    const R q = scores(e).q - LogSumExp<R>::origin(f.q), p = scores(e).p - LogSumExp<R>::origin(f.p);
    return {scores(e).q, surplus(q, p), e.column, e.label};
  }
  // The state of Q after its sum has been measured from other frames; its weights are still in the old frame.
  MR_HD static typename LogWSum<R>::State moved(DistillationState<R> s, DistillationFrame<R> f) {
    const R lost = s.q.softmax.mass * surplus(raised(s.q.softmax.frame, f.q), raised(s.p.frame, f.p));
    return {s.q.softmax,
            select(lost == R(0), s.q.sum, s.q.sum - lost)};  // x - 0 would change the sign of a -0
  }
  // An empty row has loss 0.
  MR_HD static LogNumber<R> loss(R expectation, R q_mass, R p_mass) {
    const auto sum = LogNumber<R>{expectation, R(0)} - surplus(log_number(q_mass), log_number(p_mass));
    return {select(q_mass == R(0), R(0), sum.high), select(q_mass == R(0), R(0), sum.low)};
  }
  // log Q - log P - loss, or -log P - loss. P's log-sum-exp and the loss may both be large, so each row has their difference
  // as one number, of.centre.
  MR_HD static R centred(Element<R> e, DistillationOutput<R> of) {
    return surplus(scores(e).q - of.q_lse, scores(e).p - of.centre);
  }
  // The derivatives with respect to the student's score and the teacher's. Under a probability of 1, centred is exactly 0,
  // but rounding would give another number if the scores are far apart.
  MR_HD static Gradient<R> gradient(R p_share, R q_share, R centred, R g) {
    const R by_p = g * (p_share - q_share);
    const R by_q = g * (q_share * select(q_share == R(1), R(0), centred) * unit_of_scores<R>());
    return kUnderTeacher ? Gradient<R>{by_p, by_q} : Gradient<R>{by_q, by_p};
  }
};

// A score of +inf becomes the frame and makes the whole row NaN, as in torch's log_softmax.
template <class R, DistillationLoss kLoss>
struct Distillation {
  LogSumExp<R> p;
  LogWSum<R> q;
  using Rule = DistillationRule<R, kLoss>;
  using Real = R;
  using Frame = DistillationFrame<R>;
  using State = DistillationState<R>;
  using Output = DistillationOutput<R>;
  using Upstream = R;  // the gradient of Output::loss
  static constexpr int kScores = 2;
  static constexpr bool kMonotone = true;
  MR_HD State identity() const { return {p.identity(), q.identity()}; }
  MR_HD State lift(Element<R> e) const { return accumulate(reframe(identity(), frame(e)), e); }
  MR_HD Output project(State s) const {
    const auto [q_lse, expectation] = q.project(s.q);
    const LogNumber<R> p_lse = p.project(s.p), loss = Rule::loss(expectation, s.q.softmax.mass, s.p.mass);
    return {p_lse, q_lse, p_lse - loss, loss.high};
  }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output of, R g) const {
    const R p_share = p.share(Rule::of_p(e), of.p_lse), q_share = q.softmax.share(Rule::of_q(e), of.q_lse);
    return Rule::gradient(p_share, q_share, Rule::centred(e, of), g);
  }
  MR_HD Frame frame(Element<R> e) const { return Rule::scores(e); }
  MR_HD Frame frame_of(State s) const { return {p.frame_of(s.p), q.frame_of(s.q)}; }
  MR_HD Frame join(Frame f, Frame g) const { return {p.join(f.p, g.p), q.join(f.q, g.q)}; }
  MR_HD State reframe(State s, Frame f) const {
    return {p.reframe(s.p, f.p), q.reframe(Rule::moved(s, f), f.q)};
  }
  MR_HD State add(State a, State b) const { return {p.add(a.p, b.p), q.add(a.q, b.q)}; }
  MR_HD State accumulate(State s, Element<R> e) const {
    return {p.accumulate(s.p, Rule::of_p(e)), q.accumulate(s.q, Rule::of_q(e, frame_of(s)))};
  }
};

// The monoid of the loss that `kind` selects at run time. Loops over elements are compiled once per loss (with_named).
// Outside those loops, only frame, reframe and project depend on the loss.
template <class R>
struct NamedDistillation : Distillation<R, DistillationLoss::kForwardKL> {
  using State = DistillationState<R>;
  using Output = DistillationOutput<R>;
  using Frame = DistillationFrame<R>;
  DistillationLoss kind;

#ifdef __CUDACC__
#pragma nv_exec_check_disable  // f may be a host function, which selects a kernel
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
  MR_HD State reframe(State s, Frame f) const {
    with_named([&](const auto& m) { s = m.reframe(s, f); });
    return s;
  }
  MR_HD Output project(State s) const {
    Output p;
    with_named([&](const auto& m) { p = m.project(s); });
    return p;
  }
};

}  // namespace monoidreduce
