// Any monoid behind one type, so that the law suite (laws.h) is compiled once and not once a monoid: states,
// frames, outputs and upstream gradients are lists of numbers, members are functions. A broken member can be
// planted by assigning to it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "monoidreduce/fold.h"
#include "monoidreduce/monoid.h"
#include "monoidreduce/pull.h"

namespace monoidreduce::test {

using Values = std::vector<double>;

// ---- Plain structs as lists of numbers.

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

// Calls f on every number in x: x itself, or those of its members, through nested structs.
template <class T, class F>
void for_each_number(T& x, const F& f) {
  if constexpr (std::is_arithmetic_v<std::remove_const_t<T>>) {
    f(x);
  } else {
    for_each_member(x, [&](auto& member) { for_each_number(member, f); });
  }
}

// The same, a number in two words (LogNumber) being one.
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
// The inverse. The largest 64-bit integer is not a double: it is read back from the next one.
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

// ---- A monoid, its members by their own names.

// Element<double>, with the payload where there is one. Numbers are representable in the monoid's real type.
struct Item {
  double score = 0, other = 0;
  std::int64_t column = 0, label = 0;
  Values payload = {};
  double factor = 1;
};
using ItemAt = std::function<Item(int)>;

struct AnyMonoid {
  double epsilon, smallest_normal;  // of the real type
  int scores, upstream_parts;

  std::function<Values()> identity;
  std::function<Values(const Item&)> lift;
  std::function<Values(const Values&, const Values&)> combine;
  std::function<Values(const Values&)> project;
  std::function<Values(const Values&)> statistics;  // of an output: what gradients by it are by
  // item, product, upstream -> the gradient of each score
  std::function<Values(const Item&, const Values&, const Values&)> local_gradient;
  std::function<Values(const Values&, int, const ItemAt&)> fold_tile;

  bool framed = false, monotone = false;
  std::function<Values(const Item&)> frame;
  std::function<Values(const Values&)> frame_of;
  std::function<Values(const Values&, const Values&)> join;
  std::function<Values(const Values&, const Values&)> reframe;
  std::function<Values(const Values&, const Item&)> accumulate;

  bool weighted = false, normalized = false;  // is it a PayloadMonoid, and its kNormalized
  std::optional<double> absent = {};          // of a MaskableMonoid
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

template <Monoid M>
AnyMonoid any_monoid(M m = {}) {
  using R = typename M::Real;
  using State = typename M::State;
  using Output = typename M::Output;
  using Upstream = typename M::Upstream;
  const auto state = [](const Values& list) { return from_numbers<State>(list); };
  const auto element = [](const Item& item) { return as_element<R>(item); };

  AnyMonoid any;
  any.epsilon = std::numeric_limits<R>::epsilon();
  any.smallest_normal = std::numeric_limits<R>::min();
  any.scores = M::kScores;
  any.upstream_parts = static_cast<int>(numbers(Upstream{}).size());
  any.identity = [=] { return numbers(m.identity()); };
  any.lift = [=](const Item& e) { return numbers(m.lift(element(e))); };
  any.combine = [=](const Values& a, const Values& b) { return numbers(combine(m, state(a), state(b))); };
  any.project = [=](const Values& s) { return numbers(m.project(state(s))); };
  any.statistics = [](const Values& p) {
    Values list;
    for_each_value(from_numbers<Output>(p), [&](double value) { list.push_back(value); });
    return list;
  };
  any.local_gradient = [=](const Item& e, const Values& p, const Values& g) {
    return numbers(m.local_gradient(element(e), from_numbers<Output>(p), from_numbers<Upstream>(g)));
  };
  any.fold_tile = [=](const Values& s, int count, const ItemAt& at) {
    return numbers(fold_tile(m, state(s), count, [&](int c) { return element(at(c)); }));
  };
  if constexpr (FramedMonoid<M>) {
    const auto frame = [](const Values& list) { return from_numbers<typename M::Frame>(list); };
    any.framed = true;
    any.monotone = MonotoneMonoid<M>;
    any.frame = [=](const Item& e) { return numbers(m.frame(element(e))); };
    any.frame_of = [=](const Values& s) { return numbers(m.frame_of(state(s))); };
    any.join = [=](const Values& f, const Values& g) { return numbers(m.join(frame(f), frame(g))); };
    any.reframe = [=](const Values& s, const Values& f) { return numbers(m.reframe(state(s), frame(f))); };
    any.accumulate = [=](const Values& s, const Item& e) {
      return numbers(m.accumulate(state(s), element(e)));
    };
    if constexpr (PayloadMonoid<M>) {
      any.weighted = true;
      any.normalized = M::kNormalized;
      if constexpr (MaskableMonoid<M>) any.absent = m.absent();
      any.rescale = [=](const Values& f, const Values& g) -> double { return m.rescale(frame(f), frame(g)); };
      any.weight = [=](const Item& e, const Values& f) -> double { return m.weight(element(e), frame(f)); };
      any.share = [=](const Item& e, const Values& p) -> double {
        return m.share(element(e), from_numbers<Output>(p));
      };
      any.mass = [=](const Values& s) -> double { return m.mass(state(s)); };
      any.pull = [=](const Item& e, const Values& p, double c, double u) {
        return numbers(
            pull(m, element(e), from_numbers<Output>(p), static_cast<Upstream>(c), static_cast<R>(u)));
      };
    }
  }
  return any;
}

// WithPayload as a monoid: it lifts items with a payload, and projects to the scalar output and the payload's
// fold, one number a component.
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
