// Combines finished results of folds over parts of the columns (ranks of a process group). A part's result is a log-sum-exp
// and numbers measured from it, in which a large constant added to all scores of a row has cancelled. All is in double,
// because a log-sum-exp in two words of float has 48 bits.
//
// Each struct is a monoid without lift: an identity and a combine. A part without columns has a log-sum-exp of -inf.
#pragma once

#include "monoidreduce/monoids/distillation.h"

namespace monoidreduce {

// log(e^a + e^b).
MR_HD double log_add_exp(double a, double b) {
  const double larger = a > b ? a : b, smaller = a > b ? b : a;  // smaller is NaN if a is, larger if b is
  if (a == b && abs(a) == infinity<double>()) return a;
  return larger + ::log1p(exp(smaller - larger));
}
// By how much the log-sum-exp of all columns exceeds that of a part; 0 if both are the same infinity.
MR_HD double above_part(double part, double all) { return part == all ? 0.0 : all - part; }
// The softmax probability that falls on a part's columns.
MR_HD double share_of_part(double part, double all) {
  return part == -infinity<double>() ? 0.0 : exp(-above_part(part, all));
}

struct LogSumExpProduct {
  struct State {
    double lse;
  };
  MR_HD State identity() const { return {-infinity<double>()}; }
  MR_HD State combine(State a, State b) const { return {log_add_exp(a.lse, b.lse)}; }
};

// loss: the sum of weight_c (lse - score_c) over the columns of the part. weight: the sum of the weight_c. If lse grows by x,
// the loss grows by weight x.
struct CrossEntropyProduct {
  struct State {
    double lse, loss, weight;
  };
  MR_HD State identity() const { return {-infinity<double>(), 0, 0}; }
  MR_HD State combine(State a, State b) const {
    const double lse = log_add_exp(a.lse, b.lse);
    return {lse, moved(a, lse) + moved(b, lse), a.weight + b.weight};
  }
  // A part's loss measured from the common lse. If that is infinitely far above the part's own (the part has only -inf, or
  // another part has +inf), the part's columns have probability 0 and infinite loss.
  MR_HD static double moved(State s, double lse) {
    const double above = above_part(s.lse, lse);
    if (above == infinity<double>()) return s.weight > 0 ? above : 0.0;
    return s.loss + s.weight * above;
  }
};

// The same, and the entropy of the softmax over the part.
struct LogProbsProduct {
  CrossEntropyProduct loss;
  struct State {
    CrossEntropyProduct::State loss;
    double entropy;
  };
  MR_HD State identity() const { return {loss.identity(), 0}; }
  MR_HD State combine(State a, State b) const {
    const CrossEntropyProduct::State both = loss.combine(a.loss, b.loss);
    return {both, moved(a, both.lse) + moved(b, both.lse)};
  }
  MR_HD static double moved(State s, double lse) {
    const double share = share_of_part(s.loss.lse, lse);
    return share == 0 ? 0.0 : share * (s.entropy + above_part(s.loss.lse, lse));
  }
};

// loss: an expectation under Q, relative to P (distillation.h), over the part's columns.
struct DistillationProduct {
  DistillationLoss kind;
  struct State {
    double p, q, loss;  // p, q: log-sum-exps
  };
  MR_HD State identity() const { return {-infinity<double>(), -infinity<double>(), 0}; }
  MR_HD State combine(State a, State b) const {
    const double p = log_add_exp(a.p, b.p), q = log_add_exp(a.q, b.q);
    return {p, q, moved(a, p, q) + moved(b, p, q)};
  }
  MR_HD double moved(State s, double p, double q) const {
    const double share = share_of_part(s.q, q), below_p = above_part(s.p, p);
    if (share == 0) return 0;
    const double relative = below_p == infinity<double>() ? below_p : s.loss + below_p;
    return share * (kind == DistillationLoss::kCrossEntropy ? relative : relative - above_part(s.q, q));
  }
};

}  // namespace monoidreduce
