// Tests the SIMT kernels with monoids that no operator uses: without a frame, with two scores, and with a payload. Also tests
// the error message of a failed launch.
#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/launch/fold_forward_simt.cuh"
#include "monoidreduce/launch/row_prologue.cuh"
#include "monoidreduce/monoids/argmax.h"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/monoids/weighted_sum.h"
#include "simt_reference.h"
#include "simt_report.h"
#include "simt_tensors.h"

namespace monoidreduce::test {
namespace {

// A row policy that stores products as they are, and reads upstream gradients as they are.
template <class M>
struct PlainRows {
  typename M::Output* products;
  const typename M::Upstream* upstreams;
  MR_HD bool active(std::int64_t) const { return true; }
  MR_HD std::int64_t label(std::int64_t) const { return -1; }
  MR_HD void store(std::int64_t row, typename M::Output p) const { products[row] = p; }
  MR_HD typename M::Output product(std::int64_t row) const { return products[row]; }
  MR_HD typename M::Upstream upstream(std::int64_t row) const { return upstreams[row]; }
};

// Outputs and upstream gradients of M<double> and M<float> must be structs with the same number of reals.
constexpr std::int64_t kRows = 70, kColumns = 150, kWidth = 20, kOtherWidth = 12;

// M<R>: the monoid over a real type. kOutputFields, kUpstreamFields: how many reals its Output and its Upstream have. T: the
// type in which the device computes.
template <template <class> class M, class T, int kOutputFields, int kUpstreamFields>
void check_monoid(Report& report, const char* monoid, double deviation) {
  using Real = M<T>;
  using Twice = M<double>;
  const DType dtype = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
  const std::string name = message("monoid ", monoid, " ", monoidreduce::name(dtype));
  if (!report.wants(name)) return;
  report.begin(name);
  static_assert(sizeof(typename Twice::Output) == kOutputFields * sizeof(double));
  static_assert(sizeof(typename Real::Upstream) == kUpstreamFields * sizeof(T));
  std::mt19937 random(6);
  constexpr bool kTwo = Real::kScores == 2;
  HostTensor a = random_tensor(random, {1, 1, kRows, kWidth}, dtype, deviation),
             b = random_tensor(random, {1, 1, kColumns, kWidth}, dtype), other_a, other_b,
             upstream = random_tensor(random, {kRows, kUpstreamFields}, dtype),
             product({kRows, kOutputFields});
  if (kTwo) {
    other_a = random_tensor(random, {1, 1, kRows, kOtherWidth}, dtype);
    other_b = random_tensor(random, {1, 1, kColumns, kOtherWidth}, dtype);
  }
  HostTensor d_a(a.shape), d_b(b.shape), d_other_a(other_a.shape), d_other_b(other_b.shape);
  const ColumnRange range{.left = 60, .right = 70, .shift = kColumns - kRows};
  const FoldProblem host{
      .a = a.view(), .b = b.view(), .other_a = other_a.view(), .other_b = other_b.view(), .range = range};
  const PlainRows<Twice> rows{reinterpret_cast<typename Twice::Output*>(product.values.data()),
                              reinterpret_cast<const typename Twice::Upstream*>(upstream.values.data())};
  reference_forward<false>(Twice{}, host, false, rows, {});

  const DeviceTensor device_a(a, dtype), device_b(b, dtype), device_other_a(other_a, dtype),
      device_other_b(other_b, dtype), device_upstream(upstream, dtype),
      device_product(HostTensor(product.shape), dtype);
  const FoldProblem problem{.a = device_a.view(),
                            .b = device_b.view(),
                            .other_a = device_other_a.view(),
                            .other_b = device_other_b.view(),
                            .range = range};
  const PlainRows<Real> device_rows{static_cast<typename Real::Output*>(device_product.view().data),
                                    static_cast<const typename Real::Upstream*>(device_upstream.view().data)};
  fold_forward<false>(Real{}, problem, device_rows, {}, {});
  report.compare("product", device_product, product.values);
  reference_backward<false>(
      Twice{}, host, false, rows,
      {.d_a = d_a.view(), .d_b = d_b.view(), .d_other_a = d_other_a.view(), .d_other_b = d_other_b.view()});
  const DeviceTensor g_a(HostTensor(a.shape), dtype), g_b(HostTensor(b.shape), dtype),
      g_other_a(HostTensor(other_a.shape), dtype), g_other_b(HostTensor(other_b.shape), dtype);
  fold_backward<false>(
      Real{}, problem, device_rows,
      {.d_a = g_a.view(), .d_b = g_b.view(), .d_other_a = g_other_a.view(), .d_other_b = g_other_b.view()},
      {});
  report.compare("da", g_a, d_a.values);
  report.compare("db", g_b, d_b.values);
  if (kTwo) {
    report.compare("dother_a", g_other_a, d_other_a.values);
    report.compare("dother_b", g_other_b, d_other_b.values);
  }
  report.end();
}

template <class R>
using PlainSum = Sum<R, Tanh>;

// The column of the largest score is an integer, so it is compared for equality.
void check_argmax(Report& report) {
  if (!report.wants("monoid ArgMax")) return;
  report.begin("monoid ArgMax");
  std::mt19937 random(7);
  using State = ArgMax<float>::State;
  HostTensor a = random_tensor(random, {1, 1, kRows, kWidth}, DType::kFloat32),
             b = random_tensor(random, {1, 1, kColumns, kWidth}, DType::kFloat32);
  std::fill_n(b.values.begin() + 100 * kWidth, kWidth, 0.);
  std::copy_n(b.values.begin(), 60 * kWidth, b.values.begin() + 64 * kWidth);  // ties between tiles
  std::vector<ArgMax<double>::State> expected(kRows);
  FoldProblem host{.a = a.view(), .b = b.view()};
  reference_forward<false>(ArgMax<double>{}, host, false, PlainRows<ArgMax<double>>{expected.data(), nullptr},
                           {});

  const DeviceTensor device_a(a, DType::kFloat32), device_b(b, DType::kFloat32);
  const DeviceTensor product(HostTensor({kRows, 2}), DType::kFloat32);
  auto* const device_states = static_cast<State*>(product.view().data);
  fold_forward<false>(ArgMax<float>{}, {.a = device_a.view(), .b = device_b.view()},
                      PlainRows<ArgMax<float>>{device_states, nullptr}, {}, {});
  std::vector<State> states(kRows);
  check_cuda(cudaMemcpy(states.data(), device_states, kRows * sizeof(State), cudaMemcpyDeviceToHost),
             "cudaMemcpy");
  int wrong = 0;
  for (std::int64_t i = 0; i < kRows; ++i) wrong += states[i].column != expected[i].column;
  report.note(wrong == 0, message("wrong columns ", wrong));
  report.end();
}

void check_launch_error(Report& report) {
  if (!report.wants("failed launch")) return;
  report.begin("failed launch says what and where");
  std::string text;
  try {
    launch_kernel("row_centre", &simt::row_centre<float>, 1, 4096, 0, nullptr, Tensor(), Tensor(), Tensor(),
                  Tensor(), static_cast<float*>(nullptr), static_cast<float*>(nullptr));
  } catch (const Error& error) {
    text = error.what();
  }
  for (const char* part : {"row_centre", "cudaErrorInvalid", "block 4096", "sm_"}) {
    report.note(text.find(part) != std::string::npos, part);
  }
  report.note(cudaGetLastError() == cudaSuccess, "and leaves no error behind");
  report.end();
}

}  // namespace

void check_monoids(Report& report) {
  check_monoid<WSum, float, 2, 2>(report, "WSum", 1);
  check_monoid<WSum, double, 2, 2>(report, "WSum", 1);
  check_monoid<LogWSum, float, 3, 2>(report, "LogWSum", 0.3);
  check_monoid<LogWSum, double, 3, 2>(report, "LogWSum", 0.3);
  check_monoid<PlainSum, float, 1, 1>(report, "Sum<Tanh>", 0.3);
  check_argmax(report);
  check_launch_error(report);
}

}  // namespace monoidreduce::test
