// A monoid that monoidreduce does not have, folded and differentiated by its CPU engine.
#include <monoidreduce/cpu/fold.h>
#include <monoidreduce/monoid.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

namespace mr = monoidreduce;
namespace py = pybind11;

namespace {

// For scalars. Argument-dependent lookup finds the functions for the engine's packs.
using mr::abs, mr::exp, mr::log, mr::max;

// The probability that at least one of many independent causes fires; cause j: with probability sigmoid(score).
template <class R>
struct NoisyOr {
  using Real = R;
  using Output = R;
  using Upstream = R;
  static constexpr int kScores = 1;
  struct State {
    R log_none;  // logarithm of the probability that none fires
  };
  MR_HD State identity() const { return {R(-0.f)}; }
  MR_HD State lift(mr::Element<R> e) const { return {-max(e.score, R(0)) - log(R(1) + exp(-abs(e.score)))}; }
  MR_HD State combine(State a, State b) const { return {a.log_none + b.log_none}; }
  MR_HD R project(State s) const { return R(1) - exp(s.log_none); }
  MR_HD mr::Gradient<R> local_gradient(mr::Element<R> e, R p, R g) const {
    return {g * (R(1) - p) / (R(1) + exp(-e.score)), R(0)};
  }
};
static_assert(mr::Monoid<NoisyOr<double>>);

struct Rows {
  double* p;
  const double* grad;
  bool active(std::int64_t) const { return true; }
  std::int64_t label(std::int64_t) const { return -1; }
  void store(std::int64_t row, double output) const { p[row] = output; }
  double product(std::int64_t row) const { return p[row]; }
  double upstream(std::int64_t row) const { return grad[row]; }
};

using Matrix = py::array_t<double, py::array::c_style>;

// [rows, width] as [1, 1, rows, width].
mr::TensorView view(const Matrix& m) {
  const std::int64_t rows = m.shape(0), width = m.shape(1);
  return {.data = const_cast<double*>(m.data()),
          .rank = 4,
          .size = {1, 1, rows, width},
          .stride = {0, 0, width, 1},
          .dtype = mr::DType::kFloat64};
}

mr::FoldProblem problem(const Matrix& a, const Matrix& b) {
  mr::FoldProblem p;
  p.a = view(a);
  p.b = view(b);
  return p;
}

void forward(const Matrix& a, const Matrix& b, Matrix p, int threads) {
  mr::cpu::fold_forward(NoisyOr<double>{}, problem(a, b), Rows{p.mutable_data(), nullptr}, {}, threads);
}

void backward(const Matrix& grad, const Matrix& a, const Matrix& b, Matrix p, Matrix d_a, Matrix d_b,
              int threads) {
  mr::FoldGradients gradients;
  gradients.d_a = view(d_a);
  gradients.d_b = view(d_b);
  mr::cpu::fold_backward(NoisyOr<double>{}, problem(a, b), Rows{p.mutable_data(), grad.data()}, gradients,
                         threads);
}

}  // namespace

PYBIND11_MODULE(noisy_or, m) {
  m.def("forward", &forward);
  m.def("backward", &backward);
}
