// Cross entropy between two distributions given by two scores an element: the student's (score) and the
// teacher's (other). The state is the product of two softmax states and one cross term, an expectation under
// the teacher or under the student:
//   cross entropy  -sum p_t log p_s              = lse_s - E_t[s]
//   forward KL      sum p_t (log p_t - log p_s)  = E_t[t - s] - lse_t + lse_s
//   reverse KL      sum p_s (log p_s - log p_t)  = E_s[s - t] - lse_s + lse_t
// The difference t - s is taken before it is summed, so a student close to its teacher loses no digits.
#pragma once

#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce {

enum class DistillationLoss : int { kCrossEntropy = 0, kForwardKL = 1, kReverseKL = 2 };

// The same for every loss.
template <class R>
struct DistillationFrame {
  R student, teacher;
};
template <class R>
struct DistillationState {
  typename LogSumExp<R>::State student, teacher;
  R cross;  // mass of the expectation, in the frame of the distribution that it is taken under
};
template <class R>
struct DistillationOutput {
  LogNumber<R> student_lse, teacher_lse;
  R expectation, loss;  // backward reads all but the loss
};

template <class R, DistillationLoss kLoss>
struct Distillation {
  LogSumExp<R> softmax;
  using Real = R;
  using Frame = DistillationFrame<R>;
  using State = DistillationState<R>;
  using Output = DistillationOutput<R>;
  using Upstream = R;  // gradient by loss(output)
  static constexpr int kScores = 2;
  static constexpr bool kUnderTeacher = kLoss != DistillationLoss::kReverseKL;
  MR_HD State identity() const { return {softmax.identity(), softmax.identity(), R(-0.f)}; }
  MR_HD State lift(Element<R> e) const { return accumulate(reframe(identity(), frame(e)), e); }
  MR_HD State combine(State a, State b) const {
    const Frame f = join(frame_of(a), frame_of(b));
    a = reframe(a, f), b = reframe(b, f);
    return {{f.student, a.student.mass + b.student.mass},
            {f.teacher, a.teacher.mass + b.teacher.mass},
            a.cross + b.cross};
  }
  MR_HD Output project(State s) const {
    const R mass = kUnderTeacher ? s.teacher.mass : s.student.mass;
    const R expectation = select(mass == R(0), R(0), s.cross / mass);
    return {softmax.project(s.student), softmax.project(s.teacher), expectation,
            select(mass == R(0), R(0), loss(s, expectation))};
  }
  MR_HD Gradient<R> local_gradient(Element<R> e, Output p, R g) const {
    const R student = softmax.share(e, p.student_lse), teacher = softmax.share(swapped(e), p.teacher_lse);
    const R centred = observable(e) - p.expectation;
    if constexpr (kLoss == DistillationLoss::kCrossEntropy)
      return {g * (student - teacher), -g * teacher * centred};
    if constexpr (kLoss == DistillationLoss::kForwardKL)
      return {g * (student - teacher), g * teacher * centred};
    return {g * student * centred, g * (teacher - student)};
  }

  // Measured from +inf all of a row is NaN, as of torch's log_softmax.
  MR_HD Frame frame(Element<R> e) const { return {e.score, e.other}; }
  MR_HD Frame frame_of(State s) const { return {s.student.frame, s.teacher.frame}; }
  MR_HD Frame join(Frame f, Frame g) const {
    return {softmax.join(f.student, g.student), softmax.join(f.teacher, g.teacher)};
  }
  MR_HD State reframe(State s, Frame f) const {
    const R scale = kUnderTeacher ? softmax.rescale(s.teacher.frame, f.teacher)
                                  : softmax.rescale(s.student.frame, f.student);
    return {softmax.reframe(s.student, f.student), softmax.reframe(s.teacher, f.teacher), s.cross * scale};
  }
  MR_HD State accumulate(State s, Element<R> e) const {
    const R student = softmax.weight(e, s.student.frame),
            teacher = softmax.weight(swapped(e), s.teacher.frame);
    return {{s.student.frame, s.student.mass + student},
            {s.teacher.frame, s.teacher.mass + teacher},
            s.cross + (kUnderTeacher ? teacher : student) * observable(e)};
  }
  // What the expectation is taken of.
  MR_HD static R observable(Element<R> e) {
    if constexpr (kLoss == DistillationLoss::kCrossEntropy) return e.score;
    return kUnderTeacher ? e.other - e.score : e.score - e.other;
  }
  MR_HD static Element<R> swapped(Element<R> e) { return {e.other, e.score, e.column, e.label}; }
  // The frames are subtracted before the logarithms are added: their difference is exact where it is small.
  MR_HD static R loss(State s, R expectation) {
    if constexpr (kLoss == DistillationLoss::kCrossEntropy)
      return (s.student.frame - expectation) + log(s.student.mass);
    const R ratio = (s.student.frame - s.teacher.frame) + log(s.student.mass / s.teacher.mass);
    return kUnderTeacher ? expectation + ratio : expectation - ratio;
  }
};

}  // namespace monoidreduce
