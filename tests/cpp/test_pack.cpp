// Tests packs (SIMD vectors): every function, lane by lane, against the C library's, in units in the last place (ulps), and
// every monoid of the library on packs against the laws.
#include <cmath>

#include "on_packs.h"
#include "subjects.h"

namespace monoidreduce::test {
namespace {

using Real80 = long double;

template <class T>
using Lanes = std::vector<T>;

// f applied to packs, for any number of values, which are padded to whole packs.
template <class T, class F>
Lanes<T> on_packs(const Lanes<T>& x, F f) {
  using R = cpu::LanePack<T>;
  constexpr int kLanes = cpu::kLanes<T>;
  Lanes<T> padded = x;
  padded.resize((x.size() + kLanes - 1) / kLanes * kLanes, T(0));
  for (std::size_t i = 0; i < padded.size(); i += kLanes) f(R::load(&padded[i])).store(&padded[i]);
  padded.resize(x.size());
  return padded;
}

// The error in units in the last place of the exact value; for denormal results in units of the smallest normal number.
template <class T>
double ulps(T value, Real80 exact) {
  const T rounded = static_cast<T>(exact);
  if (std::isnan(value) || std::isnan(rounded))
    return std::isnan(value) && std::isnan(rounded) ? 0 : INFINITY;
  if (value == rounded) return 0;
  if (std::isinf(value) || std::isinf(rounded)) return INFINITY;
  const int exponent = std::max(std::ilogb(std::fabs(rounded)), std::numeric_limits<T>::min_exponent - 1);
  const Real80 ulp = ldexpl(1, exponent - std::numeric_limits<T>::digits + 1);
  return static_cast<double>(fabsl(value - exact) / ulp);
}

// Arguments: special values, numbers of every size and sign, and many in [-range, range].
template <class T>
Lanes<T> arguments(double range) {
  using Limits = std::numeric_limits<T>;
  Random random(1);
  Lanes<T> x = {T(0),
                T(-0.),
                Limits::denorm_min(),
                -Limits::denorm_min(),
                Limits::min(),
                -Limits::min(),
                Limits::max(),
                Limits::lowest(),
                Limits::infinity(),
                -Limits::infinity(),
                Limits::quiet_NaN(),
                Limits::epsilon()};
  std::uniform_real_distribution<double> uniform(-range, range);
  std::uniform_int_distribution<int> exponent(Limits::min_exponent - Limits::digits,
                                              Limits::max_exponent - 1);
  for (int i = 0; i < 200000; ++i) x.push_back(static_cast<T>(uniform(random)));
  for (int i = 0; i < 100000; ++i) x.push_back(static_cast<T>(std::ldexp(normal(random), exponent(random))));
  for (int i = -2000; i < 2000; ++i) x.push_back(static_cast<T>(i * 0.5));  // where roundings tie
  return x;
}

// most(x): the largest allowed error of f(x), in ulps.
template <class T, class F, class Exact, class Most>
void check_ulps(const char* name, double range, F f, Exact exact, Most most, Checks& checks) {
  checks.section(name, sizeof(T) == 4 ? "float" : "double");
  const Lanes<T> x = arguments<T>(range), y = on_packs(x, f);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double error = ulps(y[i], exact(x[i]));
    CHECK(checks, !(error > most(x[i])), x[i], y[i], exact(x[i]), error);
  }
}

// Checks that f returns, bit by bit, what it returns on scalars.
template <class T, class F>
void check_equal(const char* name, F f, Checks& checks) {
  checks.section(name, sizeof(T) == 4 ? "float" : "double");
  const Lanes<T> x = arguments<T>(10), y = on_packs(x, f);
  for (std::size_t i = 0; i < x.size(); ++i) CHECK(checks, same(y[i], f(x[i])), x[i], y[i], f(x[i]));
}

template <class T>
void check_functions(Checks& checks) {
  constexpr bool kFloat = sizeof(T) == 4;
  // Powers below the smallest normal number may come out as 0, those in the last half binade as infinity.
  const T least = std::numeric_limits<T>::min(),
          most = std::ldexp(std::sqrt(T(0.5)), std::numeric_limits<T>::max_exponent);
  const auto clipped = [=](auto power) {
    using R = decltype(power);
    return select(power < R(least), R(0), select(power > R(most), infinity<R>(), power));
  };
  const auto clipped80 = [=](Real80 power) {
    return power < least ? 0 : power > most ? infinity<T>() : power;
  };
#if defined(__FMA__) && !defined(__SANITIZE_ADDRESS__)  // instrumented code does not fuse products
  const auto exp_ulps = [](double) { return kFloat ? 2 : 3; };
#else
  const auto exp_ulps = [](double x) { return 2 + std::fabs(x); };  // x log2(e) is rounded
#endif
  check_ulps<T>(
      "exp2", kFloat ? 150 : 1100, [=](auto x) { return clipped(exp2(x)); },
      [=](Real80 x) { return clipped80(exp2l(x)); }, [](double) { return kFloat ? 1.5 : 2.5; }, checks);
  check_ulps<T>(
      "exp", kFloat ? 100 : 750, [=](auto x) { return clipped(exp(x)); },
      [=](Real80 x) { return clipped80(expl(x)); }, exp_ulps, checks);
  check_equal<T>("log2", [](auto x) { return log2(x); }, checks);
  check_equal<T>("log", [](auto x) { return log(x); }, checks);
  if constexpr (kFloat) {
    check_ulps<T>("tanh", 12, [](auto x) { return tanh(x); }, tanhl, [](double) { return 2; }, checks);
    check_ulps<T>("erf", 5, [](auto x) { return erf(x); }, erfl, [](double) { return 3; }, checks);
  } else {
    check_equal<T>("tanh", [](auto x) { return tanh(x); }, checks);
    check_equal<T>("erf", [](auto x) { return erf(x); }, checks);
  }
  check_equal<T>("max", [](auto x) { return max(x, decltype(x)(1.5)); }, checks);
  check_equal<T>("max, other side", [](auto x) { return max(decltype(x)(-1.5), x); }, checks);
  check_equal<T>("abs", [](auto x) { return abs(x) + decltype(x)(0); }, checks);  // the sign of 0 may differ
  check_equal<T>("negation", [](auto x) { return -x; }, checks);
  check_equal<T>("select <", [](auto x) { return select(x < decltype(x)(0), -x, decltype(x)(2)); }, checks);
  check_equal<T>("select >", [](auto x) { return select(x > decltype(x)(0), -x, decltype(x)(2)); }, checks);
  check_equal<T>("select <=", [](auto x) { return select(x <= decltype(x)(0), -x, decltype(x)(2)); }, checks);
  check_equal<T>("select >=", [](auto x) { return select(x >= decltype(x)(0), -x, decltype(x)(2)); }, checks);
  check_equal<T>("select ==", [](auto x) { return select(x == decltype(x)(0), decltype(x)(1), x); }, checks);
  check_equal<T>("select !=", [](auto x) { return select(x != x, decltype(x)(7), x); }, checks);
  check_equal<T>(
      "masks",
      [](auto x) {
        return select(((x > decltype(x)(-1)) & (x < decltype(x)(1))) | (x != x), decltype(x)(3), x);
      },
      checks);

  checks.section("broadcast", kFloat ? "float" : "double");
  using R = cpu::LanePack<T>;
  for (const T x : {T(0), T(-0.), T(1.25), -std::numeric_limits<T>::infinity(),
                    std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::denorm_min()}) {
    const R pack(x);
    for (int lane = 0; lane < cpu::kLanes<T>; ++lane) CHECK(checks, same(pack[lane], x), x, pack[lane], lane);
  }
  checks.section("any", kFloat ? "float" : "double");
  for (int lane = 0; lane < cpu::kLanes<T>; ++lane) {
    R pack(T(0));
    CHECK(checks, !any(pack != R(T(0))), lane);
    pack.v[lane] = T(1);
    CHECK(checks, any(pack != R(T(0))), lane);
  }
  checks.section("transpose", kFloat ? "float" : "double");
  constexpr int kLanes = cpu::kLanes<T>;
  R packs[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) packs[i].v[lane] = static_cast<T>(100 * i + lane);
  }
  transpose(packs);
  for (int i = 0; i < kLanes; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) {
      CHECK(checks, packs[i][lane] == static_cast<T>(100 * lane + i), i, lane, packs[i][lane]);
    }
  }
}

// ---- Monoids

template <class R>
using SumGelu = Sum<R, Gelu>;
template <class R>
using SumGeluTanh = Sum<R, GeluTanh>;
template <class R>
using SumSilu = Sum<R, Silu>;
template <class R>
using SumTanh = Sum<R, Tanh>;
template <class R>
using SumRelu2 = Sum<R, Relu2>;
template <class R>
using ByTeacher = Distillation<R, DistillationLoss::kForwardKL>;
template <class R>
using ByStudent = Distillation<R, DistillationLoss::kReverseKL>;

// The subject `like`, with its monoid on packs.
template <template <class> class M, class T>
Subject in_lane(Subject like, bool last) {
  OnPacks<M, T> m;
  if (!last) m.lane = 0;
  const Subject on_packs = subject<OnPacks<M, T>>(like.name, m);
  like.monoid = on_packs.monoid;
  like.with_payload = on_packs.with_payload;
  return like;
}

// Checks the first lane and the last, against the laws and against the scalar monoid in double.
template <template <class> class M, class F>
void check_monoid(F make, Checks& checks) {
  const Subject single = make(M<float>()), twice = make(M<double>());
  for (const bool last : {false, true}) {
    for (const Subject& s : {in_lane<M, float>(single, last), in_lane<M, double>(twice, last)}) {
      check_laws(s, checks);
      check_precision(s, twice, checks);
    }
  }
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  using namespace monoidreduce;
  using namespace monoidreduce::test;
  Checks checks;
  check_functions<float>(checks);
  check_functions<double>(checks);
  check_monoid<LogSumExp>([](auto m) { return log_sum_exp<decltype(m)>(); }, checks);
  check_monoid<SumGelu>([](auto m) { return sum<decltype(m)>("Gelu"); }, checks);
  check_monoid<SumGeluTanh>([](auto m) { return sum<decltype(m)>("GeluTanh"); }, checks);
  check_monoid<SumSilu>([](auto m) { return sum<decltype(m)>("Silu"); }, checks);
  check_monoid<SumTanh>([](auto m) { return sum<decltype(m)>("Tanh"); }, checks);
  check_monoid<SumRelu2>([](auto m) { return sum<decltype(m)>("Relu2"); }, checks);
  check_monoid<CrossEntropy>([](auto m) { return cross_entropy<decltype(m)>(); }, checks);
  check_monoid<ByTeacher>([](auto m) { return distillation<decltype(m)>("forward KL"); }, checks);
  check_monoid<ByStudent>([](auto m) { return distillation<decltype(m)>("reverse KL"); }, checks);
  check_monoid<WSum>([](auto m) { return weighted_sum<decltype(m)>(); }, checks);
  check_monoid<LogWSum>([](auto m) { return log_weighted_sum<decltype(m)>(); }, checks);
  check_monoid<ArgMax>([](auto m) { return arg_max<decltype(m)>(); }, checks);
  return checks.finish();
}
