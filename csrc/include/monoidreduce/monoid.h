// The algebra: what a fold is, and what its backward pass needs. Read this file first.
//
//   P_i = fold_j f(A_i, B_j)            f lifts the score(s) of row i and column j to a state, fold is a
//   commutative combine dP_i / dX_ij = D(P_i, X_ij)         the local gradient: only the final product and
//   the element, so backward recomputes X_ij
//
// (MonoidReduce, Gyllensten 2025.) A Monoid is all that a fold needs. A FramedMonoid holds additive mass
// measured in a frame (for softmax: exponentials measured from a running maximum); moving to another frame
// multiplies the mass. That is what lets a tile of elements share one frame and one pass over exponentials. A
// PayloadMonoid's mass has a weight per element, which is what lets a vector payload ride along as a matrix
// product: attention and the two-layer MLP.
//
// Scores, frames, outputs and gradients are in natural units: a difference of scores is taken before it is
// exponentiated, so that scores of any size that lie close together lose no digits.
#pragma once

#include <concepts>
#include <type_traits>

#include "monoidreduce/math.h"

namespace monoidreduce {

// One column of one row, as a monoid sees it. Unused members vanish after inlining.
template <class R>
struct Element {
  R score;          // first score
  R other;          // second score (kScores == 2)
  Index<R> column;  // j
  Index<R> label;   // the row's label: the target class of cross entropy
};

// Derivative by the first and the second score.
template <class R>
struct Gradient {
  R score;
  R other;
};

// What every monoid has. D(P_i, X_ij) is applied to g, the gradient of the loss by the parts of P_i, and is 0 for an empty row.
template <class M>
concept Projected = std::is_trivially_copyable_v<M> && std::is_trivially_copyable_v<typename M::State> &&
                    requires(const M m, typename M::State s, Element<typename M::Real> e,
                             typename M::Output p, typename M::Upstream g) {
                      { M::kScores } -> std::convertible_to<int>;  // 1 or 2 scores an element
                      {
                        m.identity()
                      } -> std::same_as<typename M::State>;  // bitwise neutral on both sides of combine
                      { m.lift(e) } -> std::same_as<typename M::State>;  // of one element
                      {
                        m.project(s)
                      } -> std::same_as<typename M::Output>;  // P_i, for the caller and for backward
                      {
                        m.local_gradient(e, p, g)
                      } -> std::same_as<Gradient<typename M::Real>>;  // D(P_i, X_ij) g
                    };

// In place of its own combine, what one follows from: the function below.
template <class M>
concept FramedMonoid = Projected<M> && requires(const M m, typename M::State s, Element<typename M::Real> e,
                                                typename M::Frame f) {
  { m.frame(e) } -> std::same_as<typename M::Frame>;          // the least frame that can hold this element
  { m.frame_of(s) } -> std::same_as<typename M::Frame>;       // the frame that a state is measured in
  { m.join(f, f) } -> std::same_as<typename M::Frame>;        // the least frame that can hold both
  { m.reframe(s, f) } -> std::same_as<typename M::State>;     // the same state measured in another frame
  { m.add(s, s) } -> std::same_as<typename M::State>;         // the mass of both, in the frame that both have
  { m.accumulate(s, e) } -> std::same_as<typename M::State>;  // add an element's mass, in the state's frame
};

template <class M>
concept Monoid = FramedMonoid<M> || Projected<M> && requires(const M m, typename M::State s) {
  { m.combine(s, s) } -> std::same_as<typename M::State>;  // associative and commutative
};

// combine((f, m), (g, n)) == (h, rescale(f, h) m + rescale(g, h) n) with h = join(f, g); the payload is more
// of that mass.
template <class M>
concept PayloadMonoid = FramedMonoid<M> && requires(const M m, typename M::State s,
                                                    Element<typename M::Real> e, typename M::Frame f) {
  {
    M::kNormalized
  } -> std::convertible_to<bool>;  // is the output payload / mass (attention), or the payload (MLP)
  {
    m.rescale(f, f)
  } -> std::same_as<typename M::Real>;  // what mass is multiplied by on moving between frames
  { m.weight(e, f) } -> std::same_as<typename M::Real>;            // the mass of one element in frame f
  { m.share(e, m.project(s)) } -> std::same_as<typename M::Real>;  // its final weight in the output, from P_i
  { m.mass(s) } -> std::same_as<typename M::Real>;  // what the payload is divided by when kNormalized
};

// The state of all that both are of.
template <Monoid M>
MR_HD typename M::State combine(const M& m, const typename M::State& a, const typename M::State& b) {
  if constexpr (FramedMonoid<M>) {
    const auto frame = m.join(m.frame_of(a), m.frame_of(b));
    return m.add(m.reframe(a, frame), m.reframe(b, frame));
  } else {
    return m.combine(a, b);
  }
}

// A payload of D components carried by hand: host references, split folds and C++ tests. Kernels carry it as
// a matrix product.
template <PayloadMonoid M, int D>
struct WithPayload {
  M m;
  using Real = typename M::Real;
  struct State {
    typename M::State scalar;
    Real payload[D];
  };
  MR_HD State identity() const {
    State s{m.identity(), {}};
    for (int d = 0; d < D; ++d) s.payload[d] = Real(-0.f);
    return s;
  }
  MR_HD State lift(const Element<Real>& e, const Real (&value)[D]) const {
    State s{m.lift(e), {}};
    for (int d = 0; d < D; ++d) s.payload[d] = m.weight(e, m.frame_of(s.scalar)) * value[d];
    return s;
  }
  MR_HD State combine(const State& a, const State& b) const {
    State c{monoidreduce::combine(m, a.scalar, b.scalar), {}};
    const auto frame = m.frame_of(c.scalar);
    const Real scale_a = m.rescale(m.frame_of(a.scalar), frame),
               scale_b = m.rescale(m.frame_of(b.scalar), frame);
    for (int d = 0; d < D; ++d) c.payload[d] = scale_a * a.payload[d] + scale_b * b.payload[d];
    return c;
  }
};

// Calls f(m), or f with the monoid that m names at run time (NamedSum of monoids/sum.h): f, a loop over elements, is compiled for
// each of those, what is around it once.
template <class M, class F>
MR_HD void with_named(const M& m, F&& f) {
  if constexpr (requires { m.with_named(f); }) {
    m.with_named(f);
  } else {
    f(m);
  }
}

// Folds count elements into state: one join of frames for the tile, then one pass that adds mass. element(c)
// gives element c.
template <FramedMonoid M, class ElementAt>
MR_HD typename M::State fold_tile(const M& m, typename M::State state, int count, ElementAt element) {
  auto frame = m.frame_of(state);
  for (int c = 0; c < count; ++c) frame = m.join(frame, m.frame(element(c)));
  state = m.reframe(state, frame);
  for (int c = 0; c < count; ++c) state = m.accumulate(state, element(c));
  return state;
}

// The same for a monoid without a frame: one combine an element.
template <Monoid M, class ElementAt>
MR_HD typename M::State fold_tile(const M& m, typename M::State state, int count, ElementAt element) {
  for (int c = 0; c < count; ++c) state = combine(m, state, m.lift(element(c)));
  return state;
}

}  // namespace monoidreduce
