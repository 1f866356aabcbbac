// How to write a monoid in C++. The example is the log-mean-exp of the scores <a_i, b_j> of each row at a temperature:
// it lies between their mean (hot) and their maximum (cold). The program checks the laws, then folds and
// differentiates with the CPU engine. From the top folder:
//
//   g++ -std=c++20 -O3 -march=native -pthread -Icsrc/include -Itests/cpp examples/cpp/log_mean_exp.cpp -o log_mean_exp
#include <cmath>
#include <cstdio>
#include <vector>

#include "laws.h"
#include "monoidreduce/cpu/fold.h"

namespace mr = monoidreduce;

namespace {

// For scalars; argument-dependent lookup finds the functions of the engine's packs.
using mr::exp, mr::log, mr::max, mr::select;

// T log(mean_j exp(x_j / T)); -inf for no columns.
template <class R>
struct LogMeanExp {
  mr::Scalar<R> temperature = 1;
  using Real = R;
  using Frame = R;  // the largest score so far
  struct Output {
    R value, count;
  };
  using Upstream = R;  // the gradient by value
  static constexpr int kScores = 1;
  struct State {
    R frame, mass, count;
  };
  MR_HD State identity() const { return {-mr::infinity<R>(), R(0), R(0)}; }
  MR_HD State lift(mr::Element<R> e) const { return {e.score, weight(e.score, e.score), R(1)}; }
  MR_HD Output project(State s) const {
    const R value = s.frame + R(temperature) * log(s.mass / s.count);
    return {select(s.count == R(0), -mr::infinity<R>(), value), s.count};
  }
  MR_HD mr::Gradient<R> local_gradient(mr::Element<R> e, Output p, R g) const {
    return {g * weight(e.score, p.value) / p.count, R(0)};
  }

  MR_HD R frame(mr::Element<R> e) const { return e.score; }
  MR_HD R frame_of(State s) const { return s.frame; }
  MR_HD R join(R f, R g) const { return max(g, f); }
  MR_HD State reframe(State s, R f) const { return {f, s.mass * weight(s.frame, f), s.count}; }
  MR_HD State add(State a, State b) const { return {a.frame, a.mass + b.mass, a.count + b.count}; }
  MR_HD State accumulate(State s, mr::Element<R> e) const {
    return {s.frame, s.mass + weight(e.score, s.frame), s.count + R(1)};
  }
  // exp((x - f) / T), 0 for x = -inf in any frame.
  MR_HD R weight(R x, R f) const {
    return exp((x - select(f == -mr::infinity<R>(), R(0), f)) / R(temperature));
  }
};
static_assert(mr::FramedMonoid<LogMeanExp<float>>);

// The row policy (fold.h): forward stores each row's output, backward reads its upstream gradient.
struct Rows {
  using Output = LogMeanExp<float>::Output;
  Output* kept;
  const float* grad;
  bool active(std::int64_t) const { return true; }
  std::int64_t label(std::int64_t) const { return -1; }
  void store(std::int64_t row, Output p) const { kept[row] = p; }
  Output product(std::int64_t row) const { return kept[row]; }
  float upstream(std::int64_t row) const { return grad[row]; }
};

struct Matrix {
  std::int64_t rows, width;
  std::vector<float> data = std::vector<float>(rows * width);
  const float* operator[](std::int64_t row) const { return data.data() + row * width; }
  mr::TensorView view() {  // [1, 1, rows, width]
    return {.data = data.data(), .rank = 4, .size = {1, 1, rows, width}, .stride = {0, 0, width, 1}};
  }
};

// The log-mean-exp of one row, from the definition.
double definition(const std::vector<double>& a, const Matrix& b, double temperature) {
  double sum = 0;
  for (std::int64_t j = 0; j < b.rows; ++j) {
    sum += std::exp(std::inner_product(a.begin(), a.end(), b[j], 0.) / temperature);
  }
  return temperature * std::log(sum / b.rows);
}

void check_laws(double temperature, mr::test::Checks& checks) {
  auto single = mr::test::subject<LogMeanExp<float>>("LogMeanExp<float>", {static_cast<float>(temperature)});
  auto twice = mr::test::subject<LogMeanExp<double>>("LogMeanExp<double>", {temperature});
  twice.objective = [](const mr::test::Values& output, const mr::test::Values& g) {
    return g[0] * output[0];
  };
  mr::test::check_laws(single, checks);
  mr::test::check_laws(twice, checks);
  mr::test::check_precision(single, twice, checks);
}

void check_engine(double temperature, mr::test::Checks& checks) {
  checks.section("LogMeanExp", "CPU engine");
  Matrix a{50, 7}, b{1000, 7}, d_a{50, 7}, d_b{1000, 7};
  mr::test::Random random(1);
  for (Matrix* m : {&a, &b}) {
    for (float& x : m->data) x = static_cast<float>(mr::test::normal(random));
  }
  std::vector<Rows::Output> product(a.rows);
  std::vector<float> grad(a.rows, 1);
  const LogMeanExp<float> monoid{static_cast<float>(temperature)};
  const Rows rows{product.data(), grad.data()};
  mr::FoldProblem problem;
  problem.a = a.view(), problem.b = b.view();
  mr::cpu::fold_forward(monoid, problem, rows, {}, 2);
  mr::FoldGradients gradients;
  gradients.d_a = d_a.view(), gradients.d_b = d_b.view();
  mr::cpu::fold_backward(monoid, problem, rows, gradients, 2);

  for (std::int64_t i = 0; i < a.rows; ++i) {
    const std::vector<double> row(a[i], a[i] + a.width);
    const double expected = definition(row, b, temperature);
    CHECK(checks, mr::test::near(product[i].value, expected, 1e-5), product[i].value, expected);
    for (std::int64_t k = 0; k < a.width; ++k) {
      const double slope = mr::test::difference([&](double by) {
        std::vector<double> moved = row;
        moved[k] += by;
        return definition(moved, b, temperature);
      });
      CHECK(checks, mr::test::near(d_a[i][k], slope, 1e-5), d_a[i][k], slope, i, k);
    }
  }
}

}  // namespace

int main() {
  mr::test::Checks checks;
  for (const double temperature : {0.5, 1., 7.}) {
    check_laws(temperature, checks);
    check_engine(temperature, checks);
  }
  return checks.finish();
}
