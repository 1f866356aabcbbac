// Type erasure for monoids, so that the law suite (laws.h) is compiled once instead of once per monoid. States, frames, outputs
// and upstream gradients are lists of numbers; members are std::functions. A test plants a broken member by assigning to it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "monoidreduce/fold.h"
#include "monoidreduce/monoid.h"
#include "monoidreduce/pull.h"

namespace monoidreduce::test {

using Values = std::vector<double>;

// ---- Conversion between plain structs and lists of numbers.

struct Anything {
  template <class T>
  operator T() const;
};
template <class T, class... Members>
constexpr int member_count() {
  if constexpr (sizeof...(Members) < 6 && requires { T{Members{}..., Anything{}}; }) {
    return member_count<T, Members..., Anything>();
  } else {
    return sizeof...(Members);
  }
}

// Calls f on every item of an array, and on every member of a struct in order.
template <class T, class F>
void for_each_member(T& x, const F& f) {
  using Plain = std::remove_const_t<T>;
  if constexpr (std::is_array_v<Plain>) {
    for (auto& item : x) f(item);
  } else if constexpr (requires { x.scalar, x.payload; }) {  // WithPayload: arrays confuse member_count
    f(x.scalar), f(x.payload);
  } else if constexpr (!std::is_empty_v<Plain>) {
    constexpr int kMembers = member_count<Plain>();
    static_assert(kMembers <= 5, "a struct of more than five members: nest some of them");
    const auto each = [&](auto&... members) { (f(members), ...); };
    if constexpr (kMembers == 1) {
      auto& [a] = x;
      each(a);
    } else if constexpr (kMembers == 2) {
      auto& [a, b] = x;
      each(a, b);
    } else if constexpr (kMembers == 3) {
      auto& [a, b, c] = x;
      each(a, b, c);
    } else if constexpr (kMembers == 4) {
      auto& [a, b, c, d] = x;
      each(a, b, c, d);
    } else {
      auto& [a, b, c, d, e] = x;
      each(a, b, c, d, e);
    }
  }
}

// Calls f on every number in x: x itself, or the numbers of its members, through nested structs.
template <class T, class F>
void for_each_number(T& x, const F& f) {
  if constexpr (std::is_arithmetic_v<std::remove_const_t<T>>) {
    f(x);
  } else {
    for_each_member(x, [&](auto& member) { for_each_number(member, f); });
  }
}

// The same, but a number in two words (LogNumber) counts as one.
template <class T, class F>
void for_each_value(const T& x, const F& f) {
  if constexpr (requires { x.high, x.low; }) {
    f(static_cast<double>(x.high) + static_cast<double>(x.low));
  } else if constexpr (std::is_arithmetic_v<T>) {
    f(static_cast<double>(x));
  } else {
    for_each_member(x, [&](const auto& member) { for_each_value(member, f); });
  }
}

template <class T>
[[gnu::noinline]] Values numbers(const T& x) {
  Values list;
  for_each_number(x, [&](auto number) { list.push_back(static_cast<double>(number)); });
  return list;
}
template <class T>
[[gnu::noinline]] Values values_of(const T& x) {
  Values list;
  for_each_value(x, [&](double value) { list.push_back(value); });
  return list;
}
// The inverse of numbers(). The largest 64-bit integer cannot be represented as a double; it is read back from the next one.
template <class T>
[[gnu::noinline]] T from_numbers(const Values& list) {
  T x{};
  std::size_t i = 0;
  for_each_number(x, [&](auto& number) {
    using Number = std::remove_reference_t<decltype(number)>;
    const double value = list.at(i++);
    constexpr auto kMost = std::numeric_limits<Number>::max();
    number = std::is_integral_v<Number> && value >= static_cast<double>(kMost) ? kMost
                                                                               : static_cast<Number>(value);
  });
  return x;
}

// ---- The type-erased monoid; members have the names that they have in monoid.h.

// An Element<double>, and its payload if there is one. All numbers are representable in the monoid's real type.
struct Item {
  double score = 0, other = 0;
  std::int64_t column = 0, label = 0;
  Values payload = {};
  double factor = 1;
};
using ItemAt = std::function<Item(int)>;

struct AnyMonoid {
  double epsilon, smallest_normal;  // those of the real type
  int scores, upstream_parts;

  std::function<Values()> identity;
  std::function<Values(const Item&)> lift;
  std::function<Values(const Values&, const Values&)> combine;
  std::function<Values(const Values&)> project;
  std::function<Values(const Values&)> statistics;  // the numbers of an output that gradients are taken by
  // item, product, upstream -> the gradient of each score
  std::function<Values(const Item&, const Values&, const Values&)> local_gradient;
  std::function<Values(const Values&, int, const ItemAt&)> fold_tile;

  bool framed = false, monotone = false;
  std::function<Values(const Item&)> frame;
  std::function<Values(const Values&)> frame_of;
  std::function<Values(const Values&, const Values&)> join;
  std::function<Values(const Values&, const Values&)> reframe;
  std::function<Values(const Values&, const Item&)> accumulate;

  bool weighted = false, normalized = false;  // whether it is a PayloadMonoid; its kNormalized
  std::optional<double> absent = {};          // absent(), if it is a MaskableMonoid
  std::function<double(const Values&, const Values&)> rescale;
  std::function<double(const Item&, const Values&)> weight;
  std::function<double(const Item&, const Values&)> share;
  std::function<double(const Values&)> mass;
  // item, product, c, u -> {score, weight}
  std::function<Values(const Item&, const Values&, double, double)> pull;

  bool is_double() const { return epsilon == std::numeric_limits<double>::epsilon(); }
  double rounded(double x) const { return is_double() ? x : static_cast<float>(x); }
};

template <class R>
Element<R> as_element(const Item& item) {
  return {static_cast<R>(item.score), static_cast<R>(item.other), static_cast<Index<R>>(item.column),
          static_cast<Index<R>>(item.label), static_cast<R>(item.factor)};
}

// The members of a monoid M, on lists of numbers; there is a derived class for each M. Making each std::function where M is
// known would take longer to compile than the rest of the suite.
struct Members {
  virtual ~Members() = default;
  virtual Values identity() const = 0;
  virtual Values lift(const Item& e) const = 0;
  virtual Values combine(const Values& a, const Values& b) const = 0;
  virtual Values project(const Values& s) const = 0;
  virtual Values statistics(const Values& p) const = 0;
  virtual Values local_gradient(const Item& e, const Values& p, const Values& g) const = 0;
  virtual Values fold_tile(const Values& s, int count, const ItemAt& at) const = 0;
  // FramedMonoid only.
  virtual Values frame(const Item&) const { return {}; }
  virtual Values frame_of(const Values&) const { return {}; }
  virtual Values join(const Values&, const Values&) const { return {}; }
  virtual Values reframe(const Values&, const Values&) const { return {}; }
  virtual Values accumulate(const Values&, const Item&) const { return {}; }
  // PayloadMonoid only.
  virtual double rescale(const Values&, const Values&) const { return 0; }
  virtual double weight(const Item&, const Values&) const { return 0; }
  virtual double share(const Item&, const Values&) const { return 0; }
  virtual double mass(const Values&) const { return 0; }
  virtual Values pull(const Item&, const Values&, double, double) const { return {}; }
};

template <Monoid M>
struct MembersOf : Members {
  using R = typename M::Real;
  using State = typename M::State;
  using Output = typename M::Output;
  using Upstream = typename M::Upstream;
  M m;

  explicit MembersOf(const M& m) : m(m) {}
  static State state(const Values& list) { return from_numbers<State>(list); }
  static Element<R> element(const Item& item) { return as_element<R>(item); }

  Values identity() const override { return numbers(m.identity()); }
  Values lift(const Item& e) const override { return numbers(m.lift(element(e))); }
  Values combine(const Values& a, const Values& b) const override {
    return numbers(monoidreduce::combine(m, state(a), state(b)));
  }
  Values project(const Values& s) const override { return numbers(m.project(state(s))); }
  Values statistics(const Values& p) const override { return values_of(from_numbers<Output>(p)); }
  Values local_gradient(const Item& e, const Values& p, const Values& g) const override {
    return numbers(m.local_gradient(element(e), from_numbers<Output>(p), from_numbers<Upstream>(g)));
  }
  Values fold_tile(const Values& s, int count, const ItemAt& at) const override {
    return numbers(monoidreduce::fold_tile(m, state(s), count, [&](int c) { return element(at(c)); }));
  }
};

template <FramedMonoid M>
struct FramedMembersOf : MembersOf<M> {
  using MembersOf<M>::MembersOf, MembersOf<M>::m, MembersOf<M>::state, MembersOf<M>::element;
  static auto as_frame(const Values& list) { return from_numbers<typename M::Frame>(list); }

  Values frame(const Item& e) const override { return numbers(m.frame(element(e))); }
  Values frame_of(const Values& s) const override { return numbers(m.frame_of(state(s))); }
  Values join(const Values& f, const Values& g) const override {
    return numbers(m.join(as_frame(f), as_frame(g)));
  }
  Values reframe(const Values& s, const Values& f) const override {
    return numbers(m.reframe(state(s), as_frame(f)));
  }
  Values accumulate(const Values& s, const Item& e) const override {
    return numbers(m.accumulate(state(s), element(e)));
  }
};

template <PayloadMonoid M>
struct PayloadMembersOf final : FramedMembersOf<M> {
  using Framed = FramedMembersOf<M>;
  using Framed::Framed, Framed::m, Framed::state, Framed::element, Framed::as_frame;
  static auto output(const Values& list) { return from_numbers<typename M::Output>(list); }

  double rescale(const Values& f, const Values& g) const override {
    return m.rescale(as_frame(f), as_frame(g));
  }
  double weight(const Item& e, const Values& f) const override { return m.weight(element(e), as_frame(f)); }
  double share(const Item& e, const Values& p) const override { return m.share(element(e), output(p)); }
  double mass(const Values& s) const override { return m.mass(state(s)); }
  Values pull(const Item& e, const Values& p, double c, double u) const override {
    return numbers(monoidreduce::pull(m, element(e), output(p), static_cast<typename M::Upstream>(c),
                                      static_cast<typename M::Real>(u)));
  }
};

inline AnyMonoid any_monoid(const std::shared_ptr<const Members>& members) {
  AnyMonoid any{};
  any.identity = [=] { return members->identity(); };
  any.lift = [=](const Item& e) { return members->lift(e); };
  any.combine = [=](const Values& a, const Values& b) { return members->combine(a, b); };
  any.project = [=](const Values& s) { return members->project(s); };
  any.statistics = [=](const Values& p) { return members->statistics(p); };
  any.local_gradient = [=](const Item& e, const Values& p, const Values& g) {
    return members->local_gradient(e, p, g);
  };
  any.fold_tile = [=](const Values& s, int count, const ItemAt& at) {
    return members->fold_tile(s, count, at);
  };
  any.frame = [=](const Item& e) { return members->frame(e); };
  any.frame_of = [=](const Values& s) { return members->frame_of(s); };
  any.join = [=](const Values& f, const Values& g) { return members->join(f, g); };
  any.reframe = [=](const Values& s, const Values& f) { return members->reframe(s, f); };
  any.accumulate = [=](const Values& s, const Item& e) { return members->accumulate(s, e); };
  any.rescale = [=](const Values& f, const Values& g) { return members->rescale(f, g); };
  any.weight = [=](const Item& e, const Values& f) { return members->weight(e, f); };
  any.share = [=](const Item& e, const Values& p) { return members->share(e, p); };
  any.mass = [=](const Values& s) { return members->mass(s); };
  any.pull = [=](const Item& e, const Values& p, double c, double u) { return members->pull(e, p, c, u); };
  return any;
}

template <class M>
std::shared_ptr<const Members> members_of(const M& m) {
  if constexpr (PayloadMonoid<M>) {
    return std::make_shared<PayloadMembersOf<M>>(m);
  } else if constexpr (FramedMonoid<M>) {
    return std::make_shared<FramedMembersOf<M>>(m);
  } else {
    return std::make_shared<MembersOf<M>>(m);
  }
}

template <Monoid M>
AnyMonoid any_monoid(const M& m = {}) {
  using R = typename M::Real;
  AnyMonoid any = any_monoid(members_of(m));
  any.epsilon = std::numeric_limits<R>::epsilon();
  any.smallest_normal = std::numeric_limits<R>::min();
  any.scores = M::kScores;
  any.upstream_parts = static_cast<int>(numbers(typename M::Upstream{}).size());
  any.framed = FramedMonoid<M>;
  any.monotone = MonotoneMonoid<M>;
  if constexpr (PayloadMonoid<M>) {
    any.weighted = true;
    any.normalized = M::kNormalized;
    if constexpr (MaskableMonoid<M>) any.absent = m.absent();
  }
  return any;
}

// WithPayload as a monoid. It lifts items with a payload, and projects to the scalar output followed by the payload's fold, one
// number per component.
template <class M, int D>
AnyMonoid any_payload_monoid(WithPayload<M, D> p) {
  using R = typename M::Real;
  using State = typename WithPayload<M, D>::State;
  AnyMonoid any = any_monoid(p.m);
  any.identity = [=] { return numbers(p.identity()); };
  any.lift = [=](const Item& e) {
    R payload[D];
    std::copy_n(e.payload.begin(), D, payload);
    return numbers(p.lift(as_element<R>(e), payload));
  };
  any.combine = [=](const Values& a, const Values& b) {
    return numbers(p.combine(from_numbers<State>(a), from_numbers<State>(b)));
  };
  any.project = [=](const Values& list) {
    const State s = from_numbers<State>(list);
    Values output = numbers(p.m.project(s.scalar));
    const R mass = p.m.mass(s.scalar);
    for (const R sum : s.payload) output.push_back(!M::kNormalized ? sum : mass == R(0) ? R(0) : sum / mass);
    return output;
  };
  any.statistics = [scalar = any.statistics](const Values& output) {
    Values list = scalar(Values(output.begin(), output.end() - D));
    list.insert(list.end(), output.end() - D, output.end());
    return list;
  };
  return any;
}

}  // namespace monoidreduce::test
