// Tests activations and their derivatives: against long double, against central differences, and at large arguments, infinities
// and NaN.
#include "monoidreduce/activation.h"

#include <string>

#include "laws.h"

namespace monoidreduce::test {
namespace {

using Real80 = long double;

// An activation as formulas in long double. cut: whether its rounding error in finite precision is relative to z, and not to
// the value (1 + erf loses the digits of its tail).
struct Reference {
  const char* name;
  Real80 (*value)(Real80);
  Real80 (*derivative)(Real80);
  // The largest argument of an exponential in the formula, because the exponential magnifies its rounding error.
  Real80 (*exponent)(Real80);
  bool cut = false;
};

Real80 zero(Real80) { return 0; }
Real80 itself(Real80 z) { return z; }
Real80 one(Real80) { return 1; }
Real80 logistic(Real80 z) { return 1 / (1 + expl(-z)); }
Real80 logistic_slope(Real80 z) { return logistic(z) * logistic(-z); }
Real80 relu(Real80 z) { return z > 0 ? z : 0; }
Real80 step(Real80 z) { return z > 0; }
Real80 relu2(Real80 z) { return relu(z) * relu(z); }
Real80 relu2_slope(Real80 z) { return 2 * relu(z); }
Real80 silu(Real80 z) { return z * logistic(z); }
Real80 silu_slope(Real80 z) { return logistic(z) + z * logistic_slope(z); }
Real80 tanh_slope(Real80 z) { return 4 * logistic_slope(2 * z); }
Real80 normal_cdf(Real80 z) { return erfcl(-z * sqrtl(0.5L)) / 2; }
Real80 gelu(Real80 z) { return z * normal_cdf(z); }
Real80 gelu_slope(Real80 z) { return normal_cdf(z) + z * expl(-z * z / 2) / sqrtl(2 * acosl(-1)); }
Real80 gelu_tanh_argument(Real80 z) { return 2 * sqrtl(2 / acosl(-1)) * (z + 0.044715L * z * z * z); }
Real80 gelu_tanh(Real80 z) { return z * logistic(gelu_tanh_argument(z)); }
Real80 gelu_tanh_slope(Real80 z) {
  const Real80 u = gelu_tanh_argument(z), du = 2 * sqrtl(2 / acosl(-1)) * (1 + 3 * 0.044715L * z * z);
  return logistic(u) + z * logistic_slope(u) * du;
}

constexpr Reference kIdentity = {"Identity", itself, one, zero};
constexpr Reference kRelu = {"Relu", relu, step, zero};
constexpr Reference kRelu2 = {"Relu2", relu2, relu2_slope, zero};
constexpr Reference kSigmoid = {"Sigmoid", logistic, logistic_slope, itself};
constexpr Reference kSilu = {"Silu", silu, silu_slope, itself};
constexpr Reference kTanh = {"Tanh", tanhl, tanh_slope, zero};
constexpr Reference kGelu = {"Gelu", gelu, gelu_slope, zero, true};
constexpr Reference kGeluTanh = {"GeluTanh", gelu_tanh, gelu_tanh_slope, gelu_tanh_argument};

template <class R, class Activation>
void check_accuracy(const Reference& reference, Checks& checks) {
  const double epsilon = std::numeric_limits<R>::epsilon(), smallest = std::numeric_limits<R>::min();
  Random random(1);
  for (int trial = 0; trial < 20000; ++trial) {
    const R z = static_cast<R>(normal(random, trial % 4 == 0   ? 0.01
                                              : trial % 4 == 1 ? 1
                                              : trial % 4 == 2 ? 10
                                                               : 100));
    const double relative = 8 * epsilon * (1 + std::fabs(static_cast<double>(reference.exponent(z))));
    checks.section(reference.name, "value");
    const double value = Activation::value(z), expected = static_cast<double>(reference.value(z));
    const double scale = reference.cut ? std::fabs(z) : std::fabs(expected);
    CHECK(checks, near(value, expected, relative * scale + smallest * (1 + std::fabs(z))), z, value,
          expected);
    const double beside = value_beside_derivative<Activation>(z);
    CHECK(checks, near(beside, expected, relative * scale + smallest * (1 + std::fabs(z))), z, beside,
          expected);
    checks.section(reference.name, "derivative");
    const double derivative = Activation::derivative(z), slope = static_cast<double>(reference.derivative(z));
    CHECK(checks,
          near(derivative, slope, relative * std::max({1., std::fabs(slope), std::fabs(double(z)) / 4})), z,
          derivative, slope);
  }
}

template <class Activation>
void check_differences(const Reference& reference, Checks& checks) {
  checks.section(reference.name, "derivative against differences");
  Random random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    double z = normal(random, 4);
    z += std::copysign(0.01, z);  // Relu has a kink at 0
    const double expected = difference([&](double by) { return Activation::value(z + by); });
    const double derivative = Activation::derivative(z);
    CHECK(checks, near(derivative, expected, kDifferenceTolerance * (1 + z * z)), z, derivative, expected);
  }
}

// At large arguments, value and slope are equal to their limits: never NaN, and infinite only if the exact number overflows
// (Relu2).
template <class R, class Activation>
void check_far_out(const Reference& reference, Checks& checks) {
  checks.section(reference.name, "large arguments");
  const auto rounded = [](Real80 exact) { return static_cast<double>(static_cast<R>(exact)); };
  for (const double z : {1e3, 1e6, 1e10, 1e15, 1e20, 1e25, 1e30, 3e38}) {
    for (const R x : {static_cast<R>(z), static_cast<R>(-z)}) {
      const double value = Activation::value(x), expected = rounded(reference.value(x));
      CHECK(checks, near(value, expected, 1e-6 * magnitude({expected})), x, value, expected);
      const double beside = value_beside_derivative<Activation>(x);
      CHECK(checks, near(beside, expected, 1e-6 * magnitude({expected})), x, beside, expected);
      const double derivative = Activation::derivative(x), slope = rounded(reference.derivative(x));
      CHECK(checks, near(derivative, slope, 1e-6 * magnitude({slope})), x, derivative, slope);
    }
  }
}

template <class R, class Activation>
void check_not_a_number(const Reference& reference, Checks& checks) {
  checks.section(reference.name, "NaN");
  CHECK(checks, std::isnan(Activation::value(R(NAN))));
}

template <class R, class Activation>
void check_limit(const Reference& reference, double at_plus, double at_minus, Checks& checks) {
  checks.section(reference.name, "infinity");
  const double plus = Activation::value(infinity<R>()), minus = Activation::value(-infinity<R>());
  CHECK(checks, near(plus, at_plus, 0) && near(minus, at_minus, 0), plus, at_plus, minus, at_minus);
}

template <class Activation>
void check(const Reference& reference, double at_plus, double at_minus, Checks& checks) {
  check_accuracy<float, Activation>(reference, checks);
  check_accuracy<double, Activation>(reference, checks);
  check_differences<Activation>(reference, checks);
  check_far_out<float, Activation>(reference, checks);
  check_far_out<double, Activation>(reference, checks);
  check_not_a_number<float, Activation>(reference, checks);
  check_not_a_number<double, Activation>(reference, checks);
  check_limit<float, Activation>(reference, at_plus, at_minus, checks);
  check_limit<double, Activation>(reference, at_plus, at_minus, checks);
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  using namespace monoidreduce;
  using namespace monoidreduce::test;
  constexpr double kInf = std::numeric_limits<double>::infinity();
  Checks checks;
  // At -inf the activations of the form z * gate(z) are -inf * 0 = NaN, as in torch. (A masked element is skipped, and never
  // gets a score of -inf.)
  check<Identity>(kIdentity, kInf, -kInf, checks);
  check<Relu>(kRelu, kInf, 0, checks);
  check<Relu2>(kRelu2, kInf, 0, checks);
  check<Sigmoid>(kSigmoid, 1, 0, checks);
  check<Silu>(kSilu, kInf, NAN, checks);
  check<Tanh>(kTanh, 1, -1, checks);
  check<Gelu>(kGelu, kInf, NAN, checks);
  check<GeluTanh>(kGeluTanh, kInf, NAN, checks);
  return checks.finish();
}
