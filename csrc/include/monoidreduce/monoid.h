// The algebra: what a fold is, and what its backward pass needs. Read this file first.
//
//   P_i          = fold_j f(X_ij)       f lifts the scores X_ij of row i and column j to a state;
//                                       fold combines the states, in any order
//   dP_i / dX_ij = D(P_i, X_ij)         the local gradient: it needs only the final product P_i and the element,
//                                       so backward recomputes X_ij and no matrix of scores is stored
//
// (MonoidReduce, Gyllensten 2025.) A Monoid is all that a fold needs.
//
// A FramedMonoid holds additive mass measured in a frame; changing the frame multiplies the mass. Softmax is the
// example: the frame is the running maximum, the mass a sum of exponentials measured from it (online softmax).
// A tile of elements can then share one frame and one pass over exponentials.
//
// A PayloadMonoid gives each element a weight, so a fold of vectors (the payload) becomes a matrix product:
// attention and the two-layer MLP.
//
// Scores, frames, outputs and gradients are in natural units. A difference of scores is taken before it is
// exponentiated, so large scores that lie close together lose no digits.
#pragma once

#include <concepts>
#include <type_traits>

#include "monoidreduce/math.h"

namespace monoidreduce {

// One element of a row: the scores of one column. Unused members vanish after inlining.
template <class R>
struct Element {
  R score;          // first score
  R other;          // second score (kScores == 2)
  Index<R> column;  // j
  Index<R> label;   // the row's label: the target class of cross entropy
  R factor = R(1);  // the row's factor: the inverse temperature of log-probabilities
};

// The derivatives with respect to the first and the second score.
template <class R>
struct Gradient {
  R score;
  R other;
};

// The members that every monoid has. kScores is the number of scores of an element, 1 or 2. identity() is bitwise
// neutral on both sides of combine; lift(e) is the state of one element. project(s) is P_i, for the caller and for
// backward. local_gradient(e, p, g) is D(P_i, X_ij) times g, the gradient of the loss with respect to P_i; it is 0
// for an empty row.
template <class M>
concept Projected = std::is_trivially_copyable_v<M> && std::is_trivially_copyable_v<typename M::State> &&
                    requires(const M m, typename M::State s, Element<typename M::Real> e,
                             typename M::Output p, typename M::Upstream g) {
                      { M::kScores } -> std::convertible_to<int>;
                      { m.identity() } -> std::same_as<typename M::State>;
                      { m.lift(e) } -> std::same_as<typename M::State>;
                      { m.project(s) } -> std::same_as<typename M::Output>;
                      { m.local_gradient(e, p, g) } -> std::same_as<Gradient<typename M::Real>>;
                    };

// A monoid with a frame defines these members instead of combine; the function combine below follows from them.
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
concept Combines = requires(const M m, typename M::State s) {
  { m.identity() } -> std::same_as<typename M::State>;
  { m.combine(s, s) } -> std::same_as<typename M::State>;  // associative and commutative
};

template <class M>
concept Monoid = FramedMonoid<M> || (Projected<M> && Combines<M>);

// combine((f, m), (g, n)) == (h, rescale(f, h) m + rescale(g, h) n), with h = join(f, g).
// The payload's sums are rescaled and added in the same way.
template <class M>
concept PayloadMonoid = FramedMonoid<M> && requires(const M m, typename M::State s,
                                                    Element<typename M::Real> e, typename M::Frame f) {
  // true: the output is payload / mass (attention); false: the payload itself (MLP).
  { M::kNormalized } -> std::convertible_to<bool>;
  { m.rescale(f, f) } -> std::same_as<typename M::Real>;  // the factor of mass from one frame to another
  { m.weight(e, f) } -> std::same_as<typename M::Real>;   // the mass of one element in frame f
  // The element's final weight in the output, from P_i: a softmax probability in attention.
  { m.share(e, m.project(s)) } -> std::same_as<typename M::Real>;
  { m.mass(s) } -> std::same_as<typename M::Real>;  // the divisor of the payload where kNormalized: a row sum
};

// The tensor-core kernels require more, because they fold a whole tile of scores at once (device/block/fold_fragment.cuh).

// Frames grow with scores, so the largest scores of several elements determine the frame that all of them share:
//   join(frame(e), frame(f)) == frame({max(e.score, f.score), max(e.other, f.other)})
// A monoid declares this by `static constexpr bool kMonotone = true`. A monoid whose Frame is an empty type need not.
template <class M>
concept MonotoneMonoid = FramedMonoid<M> && (std::is_empty_v<typename M::Frame> || M::kMonotone);

// absent() is a score whose weight is 0 in every frame; kernels replace masked scores by it (-inf for softmax). A monoid
// may lack it only if its result depends on the payload's sums alone: columns beyond the last have payload 0. Such a
// monoid cannot be used with a mask.
template <class M>
concept MaskableMonoid = PayloadMonoid<M> && requires(const M m) {
  { m.absent() } -> std::same_as<typename M::Real>;
};
template <class M>
concept TileMonoid = PayloadMonoid<M> && MonotoneMonoid<M> &&
                     (MaskableMonoid<M> || (!M::kNormalized && std::is_empty_v<typename M::Frame>));

// Whether a monoid reads Element::column of every element. Otherwise tensor-core kernels may leave it 0 in tiles that do not
// hold the label of any row.
template <class M>
inline constexpr bool kReadsColumns = requires { requires M::kReadsColumns; };

// The state of the elements of both a and b.
template <class M>
  requires Monoid<M> || Combines<M>
MR_HD typename M::State combine(const M& m, const typename M::State& a, const typename M::State& b) {
  if constexpr (FramedMonoid<M>) {
    const auto frame = m.join(m.frame_of(a), m.frame_of(b));
    return m.add(m.reframe(a, frame), m.reframe(b, frame));
  } else {
    return m.combine(a, b);
  }
}

// Adds a row's attention sink to its state: one more element, whose payload is 0. Returns the factor by which the payload's
// sums must be multiplied. It is NaN if the sink's weight is not finite, because the sink adds weight * 0 to the sums.
template <PayloadMonoid M>
MR_HD typename M::Real join_sink(const M& m, typename M::State& state, typename M::Real score) {
  using R = typename M::Real;
  Element<R> sink{};
  sink.score = score;
  const auto before = m.frame_of(state), frame = m.join(before, m.frame(sink));
  state = m.accumulate(m.reframe(state, frame), sink);
  return m.rescale(before, frame) + m.weight(sink, frame) * R(0);
}

// A monoid with a payload of D components that is added element by element. Host references, C++ tests and the kernels
// that combine splits use it; all other kernels compute the payload's sums as a matrix product.
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

// Calls f(m), or f with the monoid that m selects at run time (NamedSum of monoids/sum.h). f is a loop over elements
// and is compiled once for each such monoid; the code around it is compiled once.
template <class M, class F>
MR_HD void with_named(const M& m, F&& f) {
  if constexpr (requires { m.with_named(f); }) {
    m.with_named(f);
  } else {
    f(m);
  }
}

// Folds a tile of count elements into state: first the tile's frames are joined, then one pass adds mass.
// element(c) returns element c.
template <FramedMonoid M, class ElementAt>
MR_HD typename M::State fold_tile(const M& m, typename M::State state, int count, ElementAt element) {
  auto frame = m.frame_of(state);
  for (int c = 0; c < count; ++c) frame = m.join(frame, m.frame(element(c)));
  state = m.reframe(state, frame);
  for (int c = 0; c < count; ++c) state = m.accumulate(state, element(c));
  return state;
}

// The same for a monoid without a frame: one combine per element.
template <Monoid M, class ElementAt>
MR_HD typename M::State fold_tile(const M& m, typename M::State state, int count, ElementAt element) {
  for (int c = 0; c < count; ++c) state = combine(m, state, m.lift(element(c)));
  return state;
}

}  // namespace monoidreduce
