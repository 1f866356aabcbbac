// The CPU engine's interpreter beside the same monoid compiled: log-sum-exp, mean score, the target's score, and the largest
// with its column. Prints seconds of the processor of a forward and of a backward pass of each, alternating, on one thread.
//
//   interpreter ROWS COLUMNS WIDTH FORWARD BACKWARD       the last two: code of monoidreduce/folds/cpu/bytecode.py
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "monoidreduce/cpu/fold.h"
#include "monoidreduce/cpu/program.h"
#include "monoidreduce/monoids/logsumexp.h"

namespace mr = monoidreduce;
using namespace mr::cpu;

template <class R>
struct TokenStats {
  using Real = R;
  using Frame = R;
  static constexpr int kScores = 1;
  struct State {
    R frame, mass, sum, target, best;
    mr::Index<R> at;
  };
  struct Output {
    mr::LogNumber<R> lse;
    R mean, target, best;
    mr::Index<R> at;
  };
  struct Upstream {
    R lse, mean, target, best;
  };
  using E = mr::Element<R>;
  static constexpr auto kNone = std::numeric_limits<mr::Index<mr::Scalar<R>>>::max();
  MR_HD static R origin(R f) { return mr::LogSumExp<R>::origin(f); }
  MR_HD State identity() const {
    return {-mr::infinity<R>(), R(0), R(-0.f), R(-0.f), -mr::infinity<R>(), mr::Index<R>(kNone)};
  }
  MR_HD State lift(E e) const { return accumulate(reframe(identity(), frame(e)), e); }
  MR_HD R frame(E e) const { return select(e.score == mr::infinity<R>(), mr::largest<R>(), e.score); }
  MR_HD R frame_of(State s) const { return s.frame; }
  MR_HD R join(R f, R g) const { return max(g, f); }
  MR_HD State reframe(State s, R f) const {
    const R factor = exp(s.frame - origin(f));
    return {f, s.mass * factor, s.sum * factor, s.target, s.best, s.at};
  }
  MR_HD State add(State a, State b) const {
    const auto take = is_larger(b.best, b.at, a.best, a.at);
    return {a.frame,
            a.mass + b.mass,
            a.sum + b.sum,
            a.target + b.target,
            select(take, b.best, a.best),
            select(take, b.at, a.at)};
  }
  MR_HD State accumulate(State s, E e) const {
    const R weight = exp(e.score - origin(s.frame));
    const auto take = is_larger(e.score, e.column, s.best, s.at);
    return {s.frame,
            s.mass + weight,
            s.sum + select(e.score == -mr::infinity<R>(), R(0), weight * e.score),
            s.target + select(e.column == e.label, e.score, R(0)),
            select(take, e.score, s.best),
            select(take, e.column, s.at)};
  }
  MR_HD Output project(State s) const {
    return {mr::LogNumber<R>{s.frame, R(0)} + mr::log_number(s.mass), s.sum / s.mass, s.target, s.best, s.at};
  }
  MR_HD mr::Gradient<R> local_gradient(E e, Output p, Upstream g) const {
    const R share = mr::exp_of_difference(e.score, origin(p.lse.high), p.lse.low);
    const R of_weight = share * (g.lse + g.mean * (e.score - p.mean));
    return {select(e.score == -mr::infinity<R>(), R(0), of_weight) + share * g.mean +
                select(e.column == e.label, g.target, R(0)) + select(e.column == p.at, g.best, R(0)),
            R(0)};
  }
};

template <class M>
struct Rows {
  const std::int64_t* labels;
  typename M::Output* products;
  const typename M::Upstream* gradients;
  bool active(std::int64_t) const { return true; }
  std::int64_t label(std::int64_t row) const { return labels[row]; }
  void store(std::int64_t row, const typename M::Output& p) const { products[row] = p; }
  typename M::Output product(std::int64_t row) const { return products[row]; }
  typename M::Upstream upstream(std::int64_t row) const { return gradients[row]; }
};
struct PullRows {
  bool active(std::int64_t) const { return true; }
  std::int64_t label(std::int64_t) const { return -1; }
  void store(std::int64_t, float) const {}
  float product(std::int64_t) const { return 0; }
  float upstream(std::int64_t) const { return 0; }
};

template <class T>
mr::TensorView matrix(std::vector<T>& data, std::int64_t rows, std::int64_t width, mr::DType dtype) {
  return {.data = data.data(), .rank = 2, .size = {rows, width}, .stride = {width, 1}, .dtype = dtype};
}

template <class F>
double seconds(F f) {
  const std::clock_t start = std::clock();
  f();
  return double(std::clock() - start) / CLOCKS_PER_SEC;
}

int main(int, char** argv) {
  const std::int64_t rows = std::atoll(argv[1]), columns = std::atoll(argv[2]), width = std::atoll(argv[3]);
  const std::string forward = argv[4], backward = argv[5];
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> a(rows * width), b(columns * width), da(a.size()), db(b.size());
  for (float& x : a) x = normal(random) / std::sqrt(static_cast<float>(width));
  for (float& x : b) x = normal(random);
  std::vector<std::int64_t> labels(rows);
  for (auto& x : labels) x = random() % columns;

  const auto as4 = [](mr::TensorView m) {
    return mr::TensorView{
        .data = m.data, .rank = 4, .size = {1, 1, m.size[0], m.size[1]}, .stride = {0, 0, m.stride[0], 1}};
  };
  const auto of = [&](std::vector<float>& data, std::int64_t n) {
    return as4(matrix(data, n, width, mr::DType::kFloat32));
  };
  const mr::FoldProblem problem{.a = of(a, rows), .b = of(b, columns)};
  mr::FoldGradients to;
  to.d_a = of(da, rows), to.d_b = of(db, columns);

  using M = TokenStats<float>;
  std::vector<M::Output> products(rows);
  std::vector<M::Upstream> upstream(rows, {1.f, .5f, -1.f, .1f});
  const Rows<M> policy{labels.data(), products.data(), upstream.data()};
  using Fold = ProgramFold<float>;
  std::vector<Fold::Output> states(rows);
  std::vector<float> gradients(rows);
  const Rows<Fold> fold_policy{labels.data(), states.data(), gradients.data()};

  // Of a row: its values, the low word, their gradients; its label and the column of the largest.
  std::vector<float> known(9 * rows);
  std::vector<std::int64_t> integers(2 * rows);
  mr::TensorView label_view = matrix(labels, 1, rows, mr::DType::kInt64);
  const Tables<float> none({}, {});
  const Program<float> fold(forward, none, {}, label_view, {}, {}, rows, columns);
  fold_forward<TokenStats, float>({}, problem, policy, {}, 1);
  for (std::int64_t row = 0; row < rows; ++row) {
    const M::Output& p = products[row];
    const float values[] = {p.lse.high, p.mean, p.target, p.best, p.lse.low, 1.f, .5f, -1.f, .1f};
    for (int k = 0; k < 9; ++k) known[k * rows + row] = values[k];
    integers[row] = labels[row], integers[rows + row] = p.at;
  }
  const Program<float> pull(backward, none, matrix(known, 9, rows, mr::DType::kFloat32),
                            matrix(integers, 2, rows, mr::DType::kInt64), {}, {}, rows, columns);
  double best[4] = {1e9, 1e9, 1e9, 1e9};
  for (int round = 0; round < 15; ++round) {
    const double times[] = {
        seconds([&] { fold_forward<TokenStats, float>({}, problem, policy, {}, 1); }),
        seconds([&] { fold_forward<ProgramFold, float>({&fold}, problem, fold_policy, {}, 1); }),
        seconds([&] { fold_backward<TokenStats, float>({}, problem, policy, to, 1); }),
        seconds([&] { fold_backward<ProgramPull, float>({&pull}, problem, PullRows{}, to, 1); })};
    for (int i = 0; i < 4; ++i) best[i] = std::min(best[i], times[i]);
  }
  std::printf("%g %g %g %g %g\n", best[0], best[1], best[2], best[3],
              double(products[0].lse.high - states[0].field[0]));
}
