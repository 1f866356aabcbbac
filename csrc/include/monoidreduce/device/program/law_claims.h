// Tests the laws of a user's monoid (mr.cpp_monoid) on four elements of a row: computes pairs of numbers that
// must agree. monoidreduce/folds/cpp/cpp_laws.py draws the elements and compares the pairs.
//
// States are compared by their projections, alone and combined with another state, because a state may have
// several representations.
#pragma once

#include "monoidreduce/device/program/statistics.h"
#include "monoidreduce/monoid.h"

// A monoid is inlined at each use. Loops over elements are not unrolled, to keep one copy.
#if defined(__CUDACC__)
#define MR_ROLLED _Pragma("unroll 1")
#else
#define MR_ROLLED
#endif

namespace monoidreduce {

// Fields describes how a P_i is made of reals and integers (monoidreduce/folds/cpp/cpp_source.py).
template <class M, class Fields>
class LawClaims {
 public:
  using R = typename M::Real;
  using State = typename M::State;
  using Output = typename M::Output;
  using Upstream = Numbers<R, Fields::kGradients>;
  static constexpr int kElements = 4;
  // How many numbers there are for all claims: for each claim those found, then those expected.
  static constexpr int kNumbers = 2 * (8 * (Fields::kReals + Fields::kIndices) + 2 * M::kScores);

  // Calls write(number) for each of them, in this order. g: the gradient with respect to the results that
  // have one.
  template <class Write>
  MR_HD static void write_all(const Element<R> (&e)[kElements], const Upstream& g, Write write) {
    const M m{};
    const State none = m.identity(), x = m.lift(e[0]), z = m.lift(e[3]),
                y = combine(m, m.lift(e[1]), m.lift(e[2]));
    const auto both = [&](const State& found, const State& expected) {
      write_product(m.project(found), write), write_product(m.project(expected), write);
    };
    both(combine(m, none, y), y);
    both(combine(m, y, none), y);
    both(combine(m, combine(m, none, none), y), y);  // as lanes without an element do
    both(combine(m, x, y), combine(m, y, x));
    both(combine(m, combine(m, x, y), z), combine(m, combine(m, y, x), z));
    both(combine(m, combine(m, x, y), z), combine(m, x, combine(m, y, z)));
    both(combine(m, combine(m, x, none), z), combine(m, x, z));
    both(fold_tile(m, y, 2, [&](int i) { return e[3 * i]; }), combine(m, combine(m, y, x), z));
    MR_ROLLED for (int count = kElements / 2; count <= kElements; count += kElements / 2) {
      const Gradient<R> found = m.local_gradient(e[0], m.project(fold(m, e, count)), Fields::upstream(g));
      write(found.score);
      if constexpr (M::kScores == 2) write(found.other);
      MR_ROLLED for (int score = 0; score < M::kScores; ++score) write(difference(m, e, count, score, g));
    }
  }

 private:
  MR_HD static State fold(const M& m, const Element<R> (&e)[kElements], int count) {
    State state = m.lift(e[0]);
    MR_ROLLED for (int i = 1; i < count; ++i) state = combine(m, state, m.lift(e[i]));
    return state;
  }

  template <class Write>
  MR_HD static void write_product(const Output& p, Write& write) {
    Numbers<R, Fields::kReals> real;
    Numbers<Index<R>, Fields::kIndices> index;
    Fields::unpack(p, real, index);
    for (int k = 0; k < Fields::kReals; ++k) write(real[k]);
    for (int k = 0; k < Fields::kIndices; ++k) write(static_cast<R>(index[k]));
  }

  // The central difference of fourth order of <g, P_i> with respect to a score of the first element.
  MR_HD static R difference(const M& m, const Element<R> (&e)[kElements], int count, int score,
                            const Upstream& g) {
    constexpr R h = R(1e-3);
    R total = R(0);
    MR_ROLLED for (int steps = -2; steps <= 2; ++steps) {
      Element<R> moved[kElements] = {e[0], e[1], e[2], e[3]};
      (score == 0 ? moved[0].score : moved[0].other) += R(steps) * h;
      Numbers<R, Fields::kReals> real;
      Numbers<Index<R>, Fields::kIndices> index;
      Fields::unpack(m.project(fold(m, moved, count)), real, index);
      R objective = R(0);
      for (int k = 0; k < Fields::kGradients; ++k) objective += g[k] * real[k];
      const R weight = R(steps == -2 ? 1 : steps == -1 ? -8 : steps == 1 ? 8 : steps == 2 ? -1 : 0);
      total += weight * objective;
    }
    return total / (R(12) * h);
  }
};

}  // namespace monoidreduce
