// Tests the CUDA operators against a fold on the host in double: every operator, forward and backward, with gradients added by
// atomics and in a fixed order. Needs no Python, so that it runs under compute-sanitizer. From the top folder:
//   nvcc -std=c++20 -O3 -arch=native -Icsrc/include tests/cpp/test_simt_*.cu csrc/cuda/*.cu csrc/path_counter.cpp -o test_simt
//   ./test_simt [cases whose name contains this]
//   compute-sanitizer --tool memcheck|racecheck|synccheck|initcheck --error-exitcode 1 ./test_simt small
#include <functional>
#include <iostream>
#include <optional>
#include <random>
#include <string>

#include "../../csrc/cuda/engine.h"
#include "monoidreduce/device/block/tile.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/operators.h"
#include "monoidreduce/rows.h"
#include "simt_reference.h"
#include "simt_report.h"
#include "simt_tensors.h"

namespace monoidreduce::test {

void check_monoids(Report& report);  // test_simt_monoids.cu

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Gradients = std::vector<std::pair<const char*, const HostTensor*>>;  // name and expected values

// Runs a backward pass three times: with atomics, and twice in the deterministic mode. The deterministic runs must give the
// right values, and the same bits in both. run(launch, gradients) adds to zero-filled gradients.
void check_backward(Report& report, DType dtype, const Gradients& expected,
                    const std::function<void(const Launch&, std::vector<DeviceTensor>&)>& run) {
  const auto zeros = [&] {
    std::vector<DeviceTensor> tensors;
    for (const auto& [name, values] : expected)
      tensors.emplace_back(HostTensor(values->shape), accumulation(dtype));
    return tensors;
  };
  auto atomic = zeros(), ordered = zeros(), again = zeros();
  run({}, atomic);
  run({.deterministic = true}, ordered);
  run({.deterministic = true}, again);
  for (std::size_t n = 0; n < expected.size(); ++n) {
    const auto& [name, values] = expected[n];
    if (!values->present()) continue;
    report.compare(name, atomic[n], values->values);
    report.compare("ordered", ordered[n], values->values);
    const auto first = ordered[n].values(), second = again[n].values();
    if (!first.empty() && std::memcmp(first.data(), second.data(), first.size() * sizeof(double)) != 0) {
      report.note(false, message(name, " of two ordered runs differ"));
    }
  }
}

enum class Bias { kNone, kFull, kOfRow, kOfColumn, kOfHead, kMask, kMaskOfKeys };

Shape bias_shape(Bias bias, const Shape& full) {
  switch (bias) {
    case Bias::kNone:
      return {};
    case Bias::kFull:
    case Bias::kMask:
      return full;
    case Bias::kOfRow:
      return {full[0], 1, full[2], 1};
    case Bias::kOfColumn:
      return {1, full[1], 1, full[3]};
    case Bias::kOfHead:
      return {1, full[1], 1, 1};
    case Bias::kMaskOfKeys:
      return {full[0], 1, 1, full[3]};
  }
  return {};
}

struct AttentionCase {
  const char* name;
  std::int64_t b, h, hkv, m, n, f, d;
  AttentionOptions options = {.scale = 0.3};
  Bias bias = Bias::kNone;
  Layout layout = Layout::kDense;
  bool gradient_of_out = true, gradient_of_lse = true;
};

void run_attention(Report& report, const AttentionCase& c, DType dtype) {
  const std::string name = message("attention ", c.name, " ", monoidreduce::name(dtype));
  if (!report.wants(name)) return;
  report.begin(name);
  std::mt19937 random(1);
  const DType acc = accumulation(dtype);
  const bool masked = c.bias == Bias::kMask || c.bias == Bias::kMaskOfKeys;
  const Shape scores{c.b, c.h, c.m, c.n};
  HostTensor q = random_tensor(random, {c.b, c.h, c.m, c.f}, dtype),
             k = random_tensor(random, {c.b, c.hkv, c.n, c.f}, dtype),
             v = random_tensor(random, {c.b, c.hkv, c.n, c.d}, dtype), bias, grad_out, grad_lse;
  if (c.bias != Bias::kNone) bias = random_tensor(random, bias_shape(c.bias, scores), dtype);
  if (masked) {
    for (double& value : bias.values) value = value > 0;
  }
  if (c.bias == Bias::kMaskOfKeys) {  // what a masked key holds must not matter
    for (std::int64_t b = 0; b < c.b; ++b)
      for (std::int64_t h = 0; h < c.hkv; ++h)
        for (std::int64_t j = 0; j < c.n; ++j)
          if (bias.values[b * c.n + j] == 0) at(k.view(), b, h, j, 0) = at(v.view(), b, h, j, c.d - 1) = kNaN;
  }
  if (c.bias == Bias::kMask && c.m > 2)
    std::fill_n(bias.values.begin() + 2 * c.n, c.n, 0);  // in row 2 everything is masked
  if (c.gradient_of_out) grad_out = random_tensor(random, {c.b, c.h, c.m, c.d}, dtype);
  if (c.gradient_of_lse) grad_lse = random_tensor(random, {c.b, c.h, c.m}, acc);

  HostTensor out({c.b, c.h, c.m, c.d}), lse({c.b, c.h, c.m}), lse_low(lse.shape);
  AttentionForward host{
      .q = q.view(), .k = k.view(), .v = v.view(), .bias = bias.view(scores), .options = c.options};
  const FoldProblem problem = attention_problem(host);
  const LogSumExp<double> softmax;
  reference_forward<true>(softmax, problem, masked,
                          LogSumExpRows<double>{lse.values.data(), lse_low.values.data(), {}}, out.view());

  const DeviceTensor device_q(q, dtype, c.layout), device_k(k, dtype, c.layout), device_v(v, dtype, c.layout),
      device_bias(bias, masked ? DType::kBool : dtype, c.layout),
      device_out(HostTensor(out.shape, kNaN), dtype), device_lse(HostTensor(lse.shape, kNaN), acc),
      device_lse_low(HostTensor(lse.shape, kNaN), acc);
  AttentionForward forward{.q = device_q.view(),
                           .k = device_k.view(),
                           .v = device_v.view(),
                           .bias = device_bias.view(scores),
                           .out = device_out.view(),
                           .lse = device_lse.view(),
                           .lse_low = device_lse_low.view(),
                           .options = c.options};
  cuda::simt::run(forward, {}, {});
  report.compare("out", device_out, out.values);
  report.compare("lse", device_lse, lse.values);

  // The centre (g_lse - delta) is computed from the rounded output; for a row whose columns are all in one tile, from the
  // columns.
  HostTensor centre(lse.shape), d_q(q.shape), d_k(k.shape), d_v(v.shape), d_bias;
  if (bias.present() && !masked) d_bias = HostTensor(bias.shape);
  const std::vector<double> rounded = device_out.values();
  for (std::size_t row = 0; row < centre.values.size(); ++row) {
    if (grad_lse.present()) centre.values[row] = grad_lse.values[row];
    const std::int64_t i = static_cast<std::int64_t>(row) % c.m;
    const std::int64_t tile = problem.range.begin(i) / kTile * kTile;
    const bool within = problem.range.end(i, c.n) <= tile + kTile;
    for (std::int64_t e = 0; grad_out.present() && e < c.d; ++e) {
      centre.values[row] -= grad_out.values[row * c.d + e] * (within ? out.values : rounded)[row * c.d + e];
    }
  }
  reference_backward<true>(
      softmax, problem, masked,
      LogSumExpRows<double>{lse.values.data(), lse_low.values.data(), {centre.values.data(), 1}},
      {.grad_out = grad_out.view(),
       .d_a = d_q.view(),
       .d_b = d_k.view(),
       .d_payload = d_v.view(),
       .d_bias = d_bias.present() ? d_bias.view(scores) : TensorView{}});
  const DeviceTensor device_grad_out(grad_out, dtype, Layout::kGapped),
      device_grad_lse(grad_lse, acc, Layout::kReversed), scratch(HostTensor({2, c.b, c.h, c.m}, kNaN), acc);
  check_backward(report, dtype, {{"dq", &d_q}, {"dk", &d_k}, {"dv", &d_v}, {"dbias", &d_bias}},
                 [&](const Launch& launch, std::vector<DeviceTensor>& g) {
                   cuda::simt::run(AttentionBackward{.grad_out = device_grad_out.view(),
                                                     .grad_lse = device_grad_lse.view(),
                                                     .q = device_q.view(),
                                                     .k = device_k.view(),
                                                     .v = device_v.view(),
                                                     .bias = device_bias.view(scores),
                                                     .out = device_out.view(),
                                                     .lse = device_lse.view(),
                                                     .lse_low = device_lse_low.view(),
                                                     .d_q = g[0].view(),
                                                     .d_k = g[1].view(),
                                                     .d_v = g[2].view(),
                                                     .d_bias = g[3].view(scores),
                                                     .scratch = scratch.view(),
                                                     .options = c.options},
                                   {}, launch);
                 });
  report.end();
}

struct CrossEntropyCase {
  const char* name;
  std::int64_t n, v, d;
  CrossEntropyOptions options = {};
  bool bias = false, invalid_target = false, gradient_of_loss = true, gradient_of_lse = false;
  Layout layout = Layout::kDense;
};

void run_cross_entropy(Report& report, const CrossEntropyCase& c, DType dtype) {
  const std::string name = message("cross_entropy ", c.name, " ", monoidreduce::name(dtype));
  if (!report.wants(name)) return;
  report.begin(name);
  std::mt19937 random(2);
  const DType acc = accumulation(dtype);
  HostTensor x = random_tensor(random, {c.n, c.d}, dtype),
             weight = random_tensor(random, {c.v, c.d}, dtype, 0.4), bias, grad_loss, grad_lse;
  if (c.bias) bias = random_tensor(random, {c.v}, dtype);
  if (c.gradient_of_loss) grad_loss = random_tensor(random, {c.n}, acc);
  if (c.gradient_of_lse) grad_lse = random_tensor(random, {c.n}, acc);
  std::vector<std::int64_t> target(c.n);
  for (std::int64_t i = 0; i < c.n; ++i)
    target[i] = i % 3 == 2 ? c.options.ignore_index : std::int64_t(random() % c.v);
  if (c.n > 0 && c.v > 0) target[0] = c.v - 1;  // the last column, in a tile that is not full
  if (!c.gradient_of_lse && c.n > 2)
    x.values[2 * c.d] = kNaN;  // an ignored token has no gradient, whatever it holds
  if (c.invalid_target && c.n > 4) target[1] = c.v, target[3] = -1, target[4] = std::int64_t{1} << 32;
  HostTensor targets({c.n});
  for (std::int64_t i = 0; i < c.n; ++i) targets.values[i] = static_cast<double>(target[i]);

  HostTensor loss({c.n}), lse({c.n}), lse_low({c.n}), d_x(x.shape), d_weight(weight.shape), d_bias;
  if (c.bias) d_bias = HostTensor(bias.shape);
  CrossEntropyForward host{.x = x.view(), .weight = weight.view(), .bias = bias.view(), .options = c.options};
  const FoldProblem problem = cross_entropy_problem(host);
  const auto vector = [](HostTensor& t) {
    return RowVector<double>{t.present() ? t.values.data() : nullptr, 1};
  };
  const CrossEntropyRows<double> rows{.target = {target.data(), 1, c.options.ignore_index, c.v},
                                      .rule = {c.options.label_smoothing, c.options.z_loss},
                                      .loss = loss.values.data(),
                                      .lse = lse.values.data(),
                                      .lse_low = lse_low.values.data(),
                                      .grad_loss = vector(grad_loss),
                                      .grad_lse = vector(grad_lse)};
  reference_forward<false>(CrossEntropy<double>{}, problem, false, rows, {});
  reference_backward<false>(CrossEntropy<double>{}, problem, false, rows,
                            {.d_a = as_rows(d_x.view()),
                             .d_b = as_rows(d_weight.view()),
                             .d_bias = c.bias ? as_column_bias(d_bias.view(), c.n) : TensorView{}});

  const DeviceTensor device_x(x, dtype, c.layout), device_weight(weight, dtype, c.layout),
      device_bias(bias, dtype, c.layout), device_target(targets, DType::kInt64, c.layout),
      device_loss(HostTensor({c.n}, kNaN), acc), device_lse(HostTensor({c.n}, kNaN), acc),
      device_lse_low(HostTensor({c.n}, kNaN), acc), device_grad_loss(grad_loss, acc, Layout::kGapped),
      device_grad_lse(grad_lse, acc, Layout::kGapped);
  cuda::simt::run(CrossEntropyForward{.x = device_x.view(),
                                      .weight = device_weight.view(),
                                      .bias = device_bias.view(),
                                      .target = device_target.view(),
                                      .loss = device_loss.view(),
                                      .lse = device_lse.view(),
                                      .lse_low = device_lse_low.view(),
                                      .options = c.options},
                  {}, {});
  report.compare("loss", device_loss, loss.values);
  report.compare("lse", device_lse, lse.values);
  check_backward(report, dtype, {{"dx", &d_x}, {"dweight", &d_weight}, {"dbias", &d_bias}},
                 [&](const Launch& launch, std::vector<DeviceTensor>& g) {
                   cuda::simt::run(CrossEntropyBackward{.grad_loss = device_grad_loss.view(),
                                                        .grad_lse = device_grad_lse.view(),
                                                        .x = device_x.view(),
                                                        .weight = device_weight.view(),
                                                        .bias = device_bias.view(),
                                                        .target = device_target.view(),
                                                        .lse = device_lse.view(),
                                                        .lse_low = device_lse_low.view(),
                                                        .d_x = g[0].view(),
                                                        .d_weight = g[1].view(),
                                                        .d_bias = g[2].view(),
                                                        .options = c.options},
                                   {}, launch);
                 });
  report.end();
}

struct DistillationCase {
  const char* name;
  std::int64_t n, v, d, e;
  double temperature = 1;
  bool mask = false, teacher_gradients = true;
  Layout layout = Layout::kDense;
};

template <DistillationLoss kLoss>
void run_distillation(Report& report, const DistillationCase& c, DType dtype) {
  constexpr const char* kNames[] = {"cross_entropy", "forward_kl", "reverse_kl"};
  const std::string name =
      message("distillation ", c.name, " ", kNames[static_cast<int>(kLoss)], " ", monoidreduce::name(dtype));
  if (!report.wants(name)) return;
  report.begin(name);
  std::mt19937 random(3);
  const DType acc = accumulation(dtype);
  const DistillationOptions options{.loss = kLoss, .temperature = c.temperature};
  HostTensor x = random_tensor(random, {c.n, c.d}, dtype),
             weight = random_tensor(random, {c.v, c.d}, dtype, 0.4),
             teacher_x = random_tensor(random, {c.n, c.e}, dtype),
             teacher_weight = random_tensor(random, {c.v, c.e}, dtype, 0.4),
             grad_loss = random_tensor(random, {c.n}, acc), mask;
  std::vector<char> kept(c.n, 1);
  if (c.mask) {
    mask = HostTensor({c.n}, 1);
    for (std::int64_t i = 1; i < c.n; i += 3) mask.values[i] = kept[i] = 0;
    if (c.n > 1) x.values[c.d] = kNaN;  // a masked token has no gradient, whatever it holds
  }
  HostTensor loss({c.n}), stats({6, c.n}), d_x(x.shape), d_weight(weight.shape), d_teacher_x,
      d_teacher_weight;
  if (c.teacher_gradients)
    d_teacher_x = HostTensor(teacher_x.shape), d_teacher_weight = HostTensor(teacher_weight.shape);
  DistillationForward host{.x = x.view(),
                           .weight = weight.view(),
                           .teacher_x = teacher_x.view(),
                           .teacher_weight = teacher_weight.view(),
                           .options = options};
  const FoldProblem problem = distillation_problem(host);
  const DistillationRows<double> rows{.mask = reinterpret_cast<const bool*>(kept.data()),
                                      .mask_stride = 1,
                                      .rows = c.n,
                                      .loss = loss.values.data(),
                                      .stats = stats.values.data(),
                                      .grad_loss = {grad_loss.values.data(), 1}};
  const Distillation<double, kLoss> monoid;
  reference_forward<false>(monoid, problem, false, rows, {});
  reference_backward<false>(monoid, problem, false, rows,
                            {.d_a = as_rows(d_x.view()),
                             .d_b = as_rows(d_weight.view()),
                             .d_other_a = as_rows(d_teacher_x.view()),
                             .d_other_b = as_rows(d_teacher_weight.view())});

  const DeviceTensor device_x(x, dtype, c.layout), device_weight(weight, dtype, c.layout),
      device_teacher_x(teacher_x, dtype, c.layout), device_teacher_weight(teacher_weight, dtype, c.layout),
      device_mask(mask, DType::kBool, c.layout), device_loss(HostTensor({c.n}, kNaN), acc),
      device_stats(HostTensor({6, c.n}, kNaN), acc), device_grad_loss(grad_loss, acc, Layout::kGapped);
  cuda::simt::run(DistillationForward{.x = device_x.view(),
                                      .weight = device_weight.view(),
                                      .teacher_x = device_teacher_x.view(),
                                      .teacher_weight = device_teacher_weight.view(),
                                      .mask = device_mask.view(),
                                      .loss = device_loss.view(),
                                      .stats = device_stats.view(),
                                      .options = options},
                  {}, {});
  report.compare("loss", device_loss, loss.values);
  report.compare("stats", device_stats, stats.values);
  check_backward(report, dtype,
                 {{"dx", &d_x},
                  {"dweight", &d_weight},
                  {"dteacher_x", &d_teacher_x},
                  {"dteacher_weight", &d_teacher_weight}},
                 [&](const Launch& launch, std::vector<DeviceTensor>& g) {
                   cuda::simt::run(DistillationBackward{.grad_loss = device_grad_loss.view(),
                                                        .x = device_x.view(),
                                                        .weight = device_weight.view(),
                                                        .teacher_x = device_teacher_x.view(),
                                                        .teacher_weight = device_teacher_weight.view(),
                                                        .mask = device_mask.view(),
                                                        .stats = device_stats.view(),
                                                        .d_x = g[0].view(),
                                                        .d_weight = g[1].view(),
                                                        .d_teacher_x = g[2].view(),
                                                        .d_teacher_weight = g[3].view(),
                                                        .options = options},
                                   {}, launch);
                 });
  report.end();
}

struct MlpCase {
  const char* name;
  std::int64_t b, m, k, n;
  bool bias = true;
  Layout layout = Layout::kDense;
};

template <ActivationKind kKind, class Activation>
void run_mlp(Report& report, const char* activation, const MlpCase& c, DType dtype) {
  const std::string name = message("mlp ", c.name, " ", activation, " ", monoidreduce::name(dtype));
  if (!report.wants(name)) return;
  report.begin(name);
  std::mt19937 random(4);
  const DType acc = accumulation(dtype);
  HostTensor x = random_tensor(random, {c.b, c.m}, dtype), w1 = random_tensor(random, {c.k, c.m}, dtype, 0.3),
             w2 = random_tensor(random, {c.n, c.k}, dtype, 0.3),
             grad_out = random_tensor(random, {c.b, c.n}, dtype), bias1, bias2;
  if (c.bias) bias1 = random_tensor(random, {c.k}, dtype), bias2 = random_tensor(random, {c.n}, dtype);

  HostTensor out({c.b, c.n}), d_x(x.shape), d_w1(w1.shape), d_w2(w2.shape), d_bias1;
  if (c.bias) d_bias1 = HostTensor(bias1.shape);
  MlpForward host{
      .x = x.view(), .w1 = w1.view(), .w2 = w2.view(), .bias1 = bias1.view(), .activation = kKind};
  const FoldProblem problem = mlp_problem(host);
  const Sum<double, Activation> monoid;
  reference_forward<true>(monoid, problem, false, SumRows<double>{}, as_rows(out.view()));
  for (std::size_t n = 0; c.bias && n < out.values.size(); ++n) out.values[n] += bias2.values[n % c.n];
  reference_backward<true>(monoid, problem, false, SumRows<double>{},
                           {.grad_out = as_rows(grad_out.view()),
                            .d_a = as_rows(d_x.view()),
                            .d_b = as_rows(d_w1.view()),
                            .d_payload = as_rows(transposed(d_w2.view())),
                            .d_bias = c.bias ? as_column_bias(d_bias1.view(), c.b) : TensorView{}});

  const DeviceTensor device_x(x, dtype, c.layout), device_w1(w1, dtype, c.layout),
      device_w2(w2, dtype, c.layout), device_bias1(bias1, dtype, c.layout),
      device_bias2(bias2, dtype, c.layout), device_out(HostTensor(out.shape, kNaN), dtype),
      device_grad_out(grad_out, dtype, Layout::kGapped);
  cuda::simt::run(MlpForward{.x = device_x.view(),
                             .w1 = device_w1.view(),
                             .w2 = device_w2.view(),
                             .bias1 = device_bias1.view(),
                             .bias2 = device_bias2.view(),
                             .out = device_out.view(),
                             .activation = kKind},
                  {}, {});
  report.compare("out", device_out, out.values);
  check_backward(report, dtype, {{"dx", &d_x}, {"dw1", &d_w1}, {"dw2", &d_w2}, {"dbias1", &d_bias1}},
                 [&](const Launch& launch, std::vector<DeviceTensor>& g) {
                   cuda::simt::run(MlpBackward{.grad_out = device_grad_out.view(),
                                               .x = device_x.view(),
                                               .w1 = device_w1.view(),
                                               .w2 = device_w2.view(),
                                               .bias1 = device_bias1.view(),
                                               .d_x = g[0].view(),
                                               .d_w1 = g[1].view(),
                                               .d_w2 = g[2].view(),
                                               .d_bias1 = g[3].view(),
                                               .activation = kKind},
                                   {}, launch);
                 });
  report.end();
}

struct LogSumExpCase {
  const char* name;
  std::int64_t m, n, f;
  double scale = 0.5;
  Layout layout = Layout::kDense;
};

void run_logsumexp(Report& report, const LogSumExpCase& c, DType dtype) {
  const std::string name = message("logsumexp ", c.name, " ", monoidreduce::name(dtype));
  if (!report.wants(name)) return;
  report.begin(name);
  std::mt19937 random(5);
  const DType acc = accumulation(dtype);
  HostTensor a = random_tensor(random, {c.m, c.f}, dtype), b = random_tensor(random, {c.n, c.f}, dtype),
             grad_lse = random_tensor(random, {c.m}, acc), lse({c.m}), lse_low({c.m}), d_a(a.shape),
             d_b(b.shape);
  LogSumExpForward host{.a = a.view(), .b = b.view(), .scale = c.scale};
  const FoldProblem problem = logsumexp_problem(host);
  const LogSumExpRows<double> rows{lse.values.data(), lse_low.values.data(), {grad_lse.values.data(), 1}};
  reference_forward<false>(LogSumExp<double>{}, problem, false, rows, {});
  reference_backward<false>(LogSumExp<double>{}, problem, false, rows,
                            {.d_a = as_rows(d_a.view()), .d_b = as_rows(d_b.view())});

  const DeviceTensor device_a(a, dtype, c.layout), device_b(b, dtype, c.layout),
      device_lse(HostTensor({c.m}, kNaN), acc), device_lse_low(HostTensor({c.m}, kNaN), acc),
      device_grad_lse(grad_lse, acc, Layout::kGapped);
  cuda::simt::run(LogSumExpForward{.a = device_a.view(),
                                   .b = device_b.view(),
                                   .lse = device_lse.view(),
                                   .lse_low = device_lse_low.view(),
                                   .scale = c.scale},
                  {}, {});
  report.compare("lse", device_lse, lse.values);
  check_backward(report, dtype, {{"da", &d_a}, {"db", &d_b}},
                 [&](const Launch& launch, std::vector<DeviceTensor>& g) {
                   cuda::simt::run(LogSumExpBackward{.grad_lse = device_grad_lse.view(),
                                                     .a = device_a.view(),
                                                     .b = device_b.view(),
                                                     .lse = device_lse.view(),
                                                     .lse_low = device_lse_low.view(),
                                                     .d_a = g[0].view(),
                                                     .d_b = g[1].view(),
                                                     .scale = c.scale},
                                   {}, launch);
                 });
  report.end();
}

// Sizes are below and above those of a tile (64), of what is staged at a time (32), and of a payload slice (128).
void run_all(Report& report) {
  using enum Layout;
  const DType all[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16},
              wide[] = {DType::kFloat32, DType::kFloat64};

  for (const DType dtype : all) {
    run_attention(report, {"small", 2, 2, 1, 65, 66, 33, 34, {.scale = 0.2}, Bias::kFull}, dtype);
    run_attention(report, {"plain", 2, 3, 3, 64, 128, 64, 64}, dtype);
    run_attention(report,
                  {"ragged, grouped, gapped", 2, 4, 2, 70, 131, 40, 72, {.scale = 0.2}, Bias::kNone, kGapped},
                  dtype);
    run_attention(report,
                  {"causal, sliced payload, reversed",
                   1,
                   2,
                   1,
                   100,
                   130,
                   17,
                   200,
                   {.scale = 0.3, .right = 0},
                   Bias::kNone,
                   kReversed},
                  dtype);
    run_attention(
        report, {"masked keys hold NaN", 2, 2, 1, 67, 150, 32, 48, {.scale = 0.2}, Bias::kMaskOfKeys}, dtype);
    run_cross_entropy(report, {"small", 66, 65, 33, {.label_smoothing = 0.1}, true}, dtype);
    run_cross_entropy(report,
                      {"every option, gapped",
                       70,
                       300,
                       40,
                       {.logit_scale = 0.7, .softcap = 3, .label_smoothing = 0.1, .z_loss = 0.01},
                       true,
                       false,
                       true,
                       true,
                       kGapped},
                      dtype);
    run_distillation<DistillationLoss::kCrossEntropy>(report, {"small", 65, 66, 33, 35, 1.5, true}, dtype);
    run_distillation<DistillationLoss::kForwardKL>(
        report, {"gapped", 70, 150, 20, 70, 2, true, true, kGapped}, dtype);
    run_distillation<DistillationLoss::kReverseKL>(
        report, {"reversed", 64, 128, 64, 32, 0.7, false, true, kReversed}, dtype);
    run_mlp<ActivationKind::kGeluTanh, GeluTanh>(report, "gelu_tanh", {"small", 65, 33, 66, 34}, dtype);
    run_mlp<ActivationKind::kSilu, Silu>(report, "silu",
                                         {"sliced output, gapped", 70, 40, 130, 150, true, kGapped}, dtype);
    run_logsumexp(report, {"small", 65, 66, 33}, dtype);
    run_logsumexp(report, {"reversed", 130, 200, 70, 0.3, kReversed}, dtype);
  }
  for (const DType dtype : wide) {
    run_attention(report,
                  {"causal, more queries than keys", 1, 1, 1, 150, 70, 24, 24, {.scale = 0.3, .right = 0}},
                  dtype);
    run_attention(report, {"window", 1, 2, 2, 200, 210, 16, 16, {.scale = 0.5, .left = 40, .right = 3}},
                  dtype);
    run_attention(report,
                  {"window on the left, sees nothing", 1, 1, 1, 90, 30, 16, 16, {.scale = 0.5, .left = 5}},
                  dtype);
    run_attention(report,
                  {"softcap and bias", 1, 2, 1, 70, 80, 16, 16, {.scale = 1, .softcap = 2}, Bias::kFull},
                  dtype);
    run_attention(report, {"bias of rows", 2, 2, 1, 70, 80, 16, 16, {.scale = 0.5}, Bias::kOfRow}, dtype);
    run_attention(report,
                  {"bias of columns, causal",
                   2,
                   4,
                   2,
                   70,
                   80,
                   16,
                   16,
                   {.scale = 0.5, .right = 0},
                   Bias::kOfColumn,
                   kGapped},
                  dtype);
    run_attention(report, {"bias of heads", 2, 4, 2, 70, 80, 16, 16, {.scale = 0.5}, Bias::kOfHead}, dtype);
    run_attention(report, {"mask, a row sees nothing", 1, 2, 1, 70, 140, 16, 16, {.scale = 0.5}, Bias::kMask},
                  dtype);
    run_attention(
        report,
        {"gradient of lse alone", 1, 2, 1, 65, 66, 16, 16, {.scale = 0.5}, Bias::kFull, kDense, false, true},
        dtype);
    run_attention(
        report,
        {"gradient of out alone", 1, 2, 1, 65, 66, 16, 16, {.scale = 0.5}, Bias::kNone, kDense, true, false},
        dtype);
    run_attention(report, {"one of each", 1, 1, 1, 1, 1, 1, 1}, dtype);
    run_attention(report, {"no keys", 1, 2, 1, 5, 0, 8, 8}, dtype);
    run_attention(report, {"no queries", 1, 2, 1, 0, 5, 8, 8}, dtype);
    run_attention(report, {"no features", 1, 1, 1, 5, 70, 0, 8}, dtype);
    run_attention(report, {"no payload", 1, 1, 1, 5, 70, 8, 0}, dtype);
    run_attention(report, {"70000 heads", 1, 70000, 70000, 2, 3, 2, 2}, dtype);
    run_cross_entropy(report, {"targets out of range", 70, 130, 20, {}, true, true}, dtype);
    run_cross_entropy(report, {"ignore_index is a class", 70, 130, 20, {.z_loss = 0.1, .ignore_index = 7}},
                      dtype);
    run_cross_entropy(report, {"gradient of lse alone", 70, 130, 20, {}, false, false, false, true}, dtype);
    run_cross_entropy(report, {"one of each", 1, 1, 1}, dtype);
    run_cross_entropy(report, {"no tokens", 0, 5, 4}, dtype);
    run_distillation<DistillationLoss::kCrossEntropy>(
        report, {"student alone", 70, 80, 20, 30, 1, false, false}, dtype);
    run_distillation<DistillationLoss::kForwardKL>(report, {"one of each", 1, 1, 1, 1}, dtype);
    run_mlp<ActivationKind::kRelu, Relu>(report, "relu", {"no bias", 70, 20, 80, 20, false}, dtype);
    run_mlp<ActivationKind::kRelu2, Relu2>(report, "relu2", {"reversed", 70, 20, 80, 20, true, kReversed},
                                           dtype);
    run_mlp<ActivationKind::kGelu, Gelu>(report, "gelu", {"bias", 70, 20, 80, 20}, dtype);
    run_mlp<ActivationKind::kTanh, Tanh>(report, "tanh", {"bias", 70, 20, 80, 20}, dtype);
    run_mlp<ActivationKind::kSigmoid, Sigmoid>(report, "sigmoid", {"bias", 70, 20, 80, 20}, dtype);
    run_mlp<ActivationKind::kIdentity, Identity>(report, "identity", {"one of each", 1, 1, 1, 1}, dtype);
    run_mlp<ActivationKind::kIdentity, Identity>(report, "identity", {"no hidden units", 5, 4, 0, 6}, dtype);
    run_logsumexp(report, {"one of each", 1, 1, 1}, dtype);
    run_logsumexp(report, {"no columns", 5, 0, 4}, dtype);
  }
}

}  // namespace
}  // namespace monoidreduce::test

int main(int argc, char** argv) {
  setenv("MONOIDREDUCE_CUDA_TIER", "simt", 1);
  using namespace monoidreduce;
  try {
    test::Report report(argc > 1 ? argv[1] : "");
    test::run_all(report);
    test::check_monoids(report);
    return report.finish();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
