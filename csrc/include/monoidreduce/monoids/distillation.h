// Losses between two distributions over the columns. An element has two scores: the student's (score) and the teacher's
// (other). Each loss is an expectation under one of the two distributions, Q, relative to the other, P.
//
//   cross entropy  E_Q[-log P]            Q is the teacher's
//   forward KL     E_Q[log Q - log P]     Q is the teacher's
//   reverse KL     E_Q[log Q - log P]     Q is the student's
//
// The state of Q is a LogWSum, the state of P a LogSumExp.
//
// A constant added to all scores of a row changes no probability, but may be large. So raw scores of student and teacher
// are never subtracted. The fold first measures each from its frame, and backward from its log-sum-exp.
#pragma once

#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/monoids/weighted_sum.h"

namespace monoidreduce {

enum class DistillationLoss : int { kCrossEntropy = 0, kForwardKL = 1, kReverseKL = 2 };

// The types below are shared by all losses.
template <class R>
struct DistillationFrame {
  R p, q;
};
template <class R>
struct DistillationState {
  typename LogSumExp<R>::State p;
  typename LogWSum<R>::State q;  // its sum is of q's weights times surplus(), measured from the frames
};
template <class R>
struct DistillationOutput {
  LogNumber<R> p_lse, q_lse, loss;
};

// The parts in which the losses differ.
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
  // The gradients of the student's and the teacher's score, from those of p and q.
  MR_HD static Gradient<R> gradient(R by_p, R by_q) {
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
  using Upstream = R;  // the gradient of Output::loss
  static constexpr int kScores = 2;
  MR_HD State identity() const { return {p.identity(), q.identity()}; }
  MR_HD State lift(Element<R> e) const { return accumulate(reframe(identity(), frame(e)), e); }
  MR_HD Output project(State s) const {
    const auto [q_lse, expectation] = q.project(s.q);
    const auto of_masses = Rule::surplus(log_number(s.q.softmax.mass), log_number(s.p.mass));
    const LogNumber<R> loss = LogNumber<R>{expectation, R(0)} - of_masses;
    const Mask<R> empty = s.q.softmax.mass == R(0);
    return {p.project(s.p), q_lse, {select(empty, R(0), loss.high), select(empty, R(0), loss.low)}};
  }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output of, R g) const {
    const R p_share = p.share(of_p(e), of.p_lse), q_share = q.softmax.share(of_q(e), of.q_lse);
    // log Q - log P - loss, or -log P - loss. The row's log-sum-exp and loss may be large: their difference comes first.
    const R centred = Rule::surplus(of_q(e).score - of.q_lse, of_p(e).score - (of.p_lse - of.loss));
    // For a probability of 1 this is 0; with scores that are far apart, rounding would give another number.
    return Rule::gradient(g * (p_share - q_share), g * q_share * select(q_share == R(1), R(0), centred));
  }

  // A score of +inf becomes the frame and makes the whole row NaN, as in torch's log_softmax.
  MR_HD Frame frame(Element<R> e) const { return Rule::scores(e); }
  MR_HD Frame frame_of(State s) const { return {p.frame_of(s.p), q.frame_of(s.q)}; }
  MR_HD Frame join(Frame f, Frame g) const { return {p.join(f.p, g.p), q.join(f.q, g.q)}; }
  MR_HD State reframe(State s, Frame f) const {
    const Frame from = frame_of(s);
    const R by = Rule::surplus(p.raised(from.q, f.q), p.raised(from.p, f.p));
    return {p.reframe(s.p, f.p), q.reframe(q.less(s.q, by), f.q)};
  }
  MR_HD State add(State a, State b) const { return {p.add(a.p, b.p), q.add(a.q, b.q)}; }
  MR_HD State accumulate(State s, Element<R> e) const {
    Element<R> under_q = of_q(e);
    under_q.other =
        Rule::surplus(of_q(e).score - p.origin(s.q.softmax.frame), of_p(e).score - p.origin(s.p.frame));
    return {p.accumulate(s.p, of_p(e)), q.accumulate(s.q, under_q)};
  }

  // The element as LogSumExp (P) and LogWSum (Q) take it.
  MR_HD static Element<R> of_p(Element<R> e) { return {Rule::scores(e).p, R(0), e.column, e.label}; }
  MR_HD static Element<R> of_q(Element<R> e) { return {Rule::scores(e).q, R(0), e.column, e.label}; }
};

// The monoid of the loss that `kind` selects at run time. Loops over elements are compiled once per loss (with_named).
// Outside of them only frame, reframe and project depend on the loss.
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
