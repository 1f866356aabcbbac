// OnPacks<M, T>: the monoid M on the CPU engine's packs (SIMD vectors), of which one lane is presented as a monoid of
// scalars. So the law suite tests the code that the engine runs. The other lanes hold NaN, which must not matter.
#pragma once

#include <cstring>

#include "monoidreduce/cpu/panels.h"
#include "monoidreduce/fold.h"

namespace monoidreduce::test {

struct NoFrame {};
template <class M>
struct FrameOf {
  using Type = NoFrame;
};
template <FramedMonoid M>
struct FrameOf<M> {
  using Type = typename M::Frame;
};

template <template <class> class M, class T>
struct OnPacks {
  using R = cpu::LanePack<T>;
  using Packs = M<R>;
  static constexpr int kLanes = cpu::kLanes<T>;
  M<T> scalar = {};
  int lane = kLanes - 1;

  using Real = T;
  using State = typename M<T>::State;
  using Output = typename M<T>::Output;
  using Upstream = typename M<T>::Upstream;
  using Frame = typename FrameOf<M<T>>::Type;
  using PackFrame = typename FrameOf<Packs>::Type;
  static constexpr int kScores = M<T>::kScores;
  static constexpr bool kNormalized = [] {
    if constexpr (requires { M<T>::kNormalized; }) return M<T>::kNormalized;
    return false;
  }();

  State identity() const { return scalars<State>(m().identity()); }
  State lift(const Element<T>& e) const { return scalars<State>(m().lift(element(e))); }
  State combine(const State& a, const State& b) const
    requires(!FramedMonoid<Packs>)
  {
    return scalars<State>(m().combine(state(a), state(b)));
  }
  Output project(const State& s) const { return scalars<Output>(m().project(state(s))); }
  Gradient<T> local_gradient(const Element<T>& e, const Output& p, const Upstream& g) const {
    return scalars<Gradient<T>>(
        m().local_gradient(element(e), packs<typename Packs::Output>(p), packs<typename Packs::Upstream>(g)));
  }

  Frame frame(const Element<T>& e) const
    requires FramedMonoid<Packs>
  {
    return scalars<Frame>(m().frame(element(e)));
  }
  Frame frame_of(const State& s) const
    requires FramedMonoid<Packs>
  {
    return scalars<Frame>(m().frame_of(state(s)));
  }
  Frame join(const Frame& f, const Frame& g) const
    requires FramedMonoid<Packs>
  {
    return scalars<Frame>(m().join(pack_frame(f), pack_frame(g)));
  }
  State reframe(const State& s, const Frame& f) const
    requires FramedMonoid<Packs>
  {
    return scalars<State>(m().reframe(state(s), pack_frame(f)));
  }
  State add(const State& a, const State& b) const
    requires FramedMonoid<Packs>
  {
    return scalars<State>(m().add(state(a), state(b)));
  }
  State accumulate(const State& s, const Element<T>& e) const
    requires FramedMonoid<Packs>
  {
    return scalars<State>(m().accumulate(state(s), element(e)));
  }
  T rescale(const Frame& f, const Frame& g) const
    requires PayloadMonoid<Packs>
  {
    return m().rescale(pack_frame(f), pack_frame(g))[lane];
  }
  T weight(const Element<T>& e, const Frame& f) const
    requires PayloadMonoid<Packs>
  {
    return m().weight(element(e), pack_frame(f))[lane];
  }
  T share(const Element<T>& e, const Output& p) const
    requires PayloadMonoid<Packs>
  {
    return m().share(element(e), packs<typename Packs::Output>(p))[lane];
  }
  T mass(const State& s) const
    requires PayloadMonoid<Packs>
  {
    return m().mass(state(s))[lane];
  }

 private:
  Packs m() const { return cpu::as_packs<M, T>(scalar); }
  template <class PackType, class ScalarType>
  PackType packs(const ScalarType& s) const {
    PackType p{};
    if constexpr (!std::is_empty_v<ScalarType>) {
      std::memset(static_cast<void*>(&p), -1, sizeof(p));  // NaN, and column -1
      cpu::set_lane<T>(p, lane, s);
    }
    return p;
  }
  template <class ScalarType, class PackType>
  ScalarType scalars(const PackType& p) const {
    if constexpr (std::is_empty_v<ScalarType>) {
      return {};
    } else {
      return cpu::lane_of<T, ScalarType>(p, lane);
    }
  }
  Element<R> element(const Element<T>& e) const { return packs<Element<R>>(e); }
  typename Packs::State state(const State& s) const { return packs<typename Packs::State>(s); }
  PackFrame pack_frame(const Frame& f) const { return packs<PackFrame>(f); }
};

}  // namespace monoidreduce::test
