// Log-probabilities of class indices under the softmax of logits / temperature, with its entropy and the largest logit.
// The logits are made as in linear cross entropy.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/monoids/log_probs.h"
#include "monoidreduce/ops/cross_entropy.h"

namespace monoidreduce {

inline constexpr double kLeastTemperature = 0x1p-100, kMostTemperature = 0x1p100;
MR_HD constexpr bool is_temperature(double t) { return t >= kLeastTemperature && t <= kMostTemperature; }

struct LogProbsOptions {
  double logit_scale = 1, softcap = 0, temperature = 1;  // temperature: not read if each row has its own
  std::int64_t ignore_index = -100;
  std::int64_t first_class = 0, classes = -1;  // as in CrossEntropyOptions
};
template <std::same_as<LogProbsOptions> X>
constexpr auto describe(const X*) {
  return fields(option("logit_scale", &X::logit_scale),
                option("softcap", &X::softcap, "a number >= 0, 0 for none", [](double v) { return v >= 0; }),
                option("temperature", &X::temperature, "a number from 2^-100 to 2^100", &is_temperature),
                option("ignore_index", &X::ignore_index), option("first_class", &X::first_class),
                option("classes", &X::classes));
}

// The number of words that hold a bit for each class.
constexpr std::int64_t words_of_classes(std::int64_t classes) { return (classes + 31) / 32; }
template <class Call>
void check_mask(const Call& x) {
  if (!x.mask.present()) return;
  const std::int64_t words = words_of_classes(all_classes(x));
  require(x.mask.size[1] == words, "mask: expected ", words, " words for ", all_classes(x), " classes, got ",
          x.mask.size[1]);
}
// mask: which classes each row keeps, KeptClasses below. Its words are integers of 32 bits, which TensorView does not have, so
// they come as float32 of the same bits. It has the bits of all classes, even if `weight` is a slice of them.
template <class Call>
constexpr auto log_probs_operands() {
  return std::tuple_cat(
      cross_entropy_operands<Call>(),
      fields(tensor("target", &Call::target, "N", Type::kInt64),
             optional("temperatures", &Call::temperatures, "N", Type::kAccumulation),
             optional("mask", &Call::mask, "N W", Type::kFloat32).dense().where(&check_mask<Call>)));
}
// The upstream gradients, and the row statistics that forward saved.
template <class Call>
constexpr auto log_probs_residuals() {
  return fields(optional("grad_log_probs", &Call::grad_log_probs, "N", Type::kAccumulation),
                optional("grad_entropy", &Call::grad_entropy, "N", Type::kAccumulation),
                optional("grad_lse", &Call::grad_lse, "N", Type::kAccumulation),
                tensor("entropy", &Call::entropy, "N", Type::kAccumulation).dense(),
                tensor("lse", &Call::lse, "N", Type::kAccumulation).dense(),
                tensor("lse_low", &Call::lse_low, "N", Type::kAccumulation).dense());
}

struct LogProbsForward {
  TensorView x, weight, bias, target, temperatures, mask;
  TensorView log_probs;  // +inf where the target is not among the folded classes
  TensorView entropy, lse, lse_low;
  TensorView top1;     // absent if not wanted
  TensorView scratch;  // size: Plan::scratch
  // The softmax weights of the first K classes, from which backward computes dlogits (LogProbsLocalGradient). The last part of
  // scratch, from SavedDlogits::frames on, has their frames (row maxima). Lines are padded to a multiple of 8. Only if
  // Capabilities::keeps, and without a bias, a softcap or top1, for which registers do not suffice.
  TensorView kept;
  TensorView order, gathered;            // as in CrossEntropyForward
  TensorView row_planes, column_planes;  // of x and weight
  LogProbsOptions options;
  std::int64_t saved_columns = 0;  // as in CrossEntropyForward
};
// Throws if an active token's temperature is out of range. Only on the CPU; on a GPU such a token's results are NaN.
inline void check_temperatures(const LogProbsForward& x) {
  const TensorView& t = x.temperatures;
  if (!t.present() || t.is_cuda()) return;
  const auto* targets = static_cast<const std::int64_t*>(x.target.data);
  for (std::int64_t i = 0; i < t.size[0]; ++i) {
    const double value = t.dtype == DType::kFloat64 ? static_cast<const double*>(t.data)[i * t.stride[0]]
                                                    : static_cast<const float*>(t.data)[i * t.stride[0]];
    require(targets[i * x.target.stride[0]] == x.options.ignore_index || is_temperature(value),
            "temperature[", i, "]: expected a number from 2^-100 to 2^100, got ", value);
  }
}
// Why tensor cores cannot take the call, or null; like sm80_obstacle. Their tiles lack registers.
inline const char* obstacle(const LogProbsForward& x) {
  return x.top1.present() && x.mask.present() && has_bias_or_softcap(x)
             ? "top1 is of kept classes, whose logits have a bias or a softcap"
             : nullptr;
}
inline const char* sm80_obstacle(const LogProbsForward& x) {
  if (x.mask.present()) return "some classes are kept";
  return x.top1.present() && has_bias_or_softcap(x) ? "top1 is of logits with a bias or a softcap" : nullptr;
}
inline void check_kept_weights(const LogProbsForward& x) {
  check_kept(x);
  require(!x.kept.present() || (!has_bias_or_softcap(x) && !x.top1.present()),
          "kept: expected none where there is a bias, a softcap or top1, got a tensor");
}
template <std::same_as<LogProbsForward> X>
constexpr auto describe(const X*) {
  return pass("log_probs_forward", kCpu | kSimt | kSm80 | kSm90 | kPlanes, log_probs_operands<X>(),
              result("log_probs", &X::log_probs, "N", Type::kAccumulation).where(&check_targets<X>),
              result("entropy", &X::entropy, "N", Type::kAccumulation).where(&check_temperatures),
              result("top1", &X::top1, "N", Type::kInt64).maybe(),
              result("lse", &X::lse, "N", Type::kAccumulation),
              result("lse_low", &X::lse_low, "N", Type::kAccumulation), scratch("scratch", &X::scratch),
              result("kept", &X::kept, "N K").maybe().strided().where(&check_kept_weights),
              order_of(&X::order, "N").where(&check_no_order_on_cpu<X>),
              optional("gathered", &X::gathered, "R D").dense().where([](const X& x) {
                check_gathered("gathered", x, x.gathered);
              }),
              planes_of_operands<X>("N", "V", "D"), options(&X::options), saved_columns(&X::saved_columns));
}

struct LogProbsBackward {
  TensorView grad_log_probs, grad_entropy, grad_lse, x, weight, bias, target, temperatures, mask, entropy,
      lse, lse_low;
  TensorView d_x, d_weight, d_bias;
  LogProbsOptions options;
  std::int64_t workspace = 0;  // bytes for dlogits
};
inline const char* obstacle(const LogProbsBackward& x) {
  return x.mask.present() && has_bias_or_softcap(x)
             ? "some classes are kept, whose logits have a bias or a softcap"
             : nullptr;
}
template <std::same_as<LogProbsBackward> X>
constexpr auto describe(const X*) {
  return pass("log_probs_backward", kCpu | kSimt, log_probs_operands<X>(), log_probs_residuals<X>(),
              gradient("dx", &X::d_x, "N D"), gradient("dweight", &X::d_weight, "V D"),
              gradient("dbias", &X::d_bias, "V", Type::kAccumulation).where(&check_bias_gradient<X>),
              options(&X::options), workspace(&X::workspace));
}

// Like CrossEntropyLocalGradient. If frames are present, out holds the softmax weights of these classes that forward saved, and
// no score is recomputed. log_probs then has the digits that a softmax probability near 1 lacks.
struct LogProbsLocalGradient {
  TensorView grad_log_probs, grad_entropy, grad_lse, x, weight, bias, target, temperatures, mask, entropy,
      lse, lse_low, out, sums, order, frames, log_probs, row_planes, column_planes;
  LogProbsOptions options;
};
inline void check_frames(const LogProbsLocalGradient& x) {
  const bool kept = x.frames.present();
  require(kept == x.log_probs.present(), "log_probs: expected a tensor if and only if there are frames, got ",
          x.log_probs.present() ? "one" : "none");
  require(!kept || !has_bias_or_softcap(x),
          "frames: expected none where there is a bias or softcap, got a tensor");
  if (!kept) return;
  const bool vectors = x.out.size[0] <= 1 || x.out.stride[0] >= (x.out.size[1] + 7) / 8 * 8;
  require(vectors && reinterpret_cast<std::uintptr_t>(x.out.data) % 16 == 0 && x.out.stride[0] % 8 == 0,
          "out: expected lines padded to a multiple of 8 elements, on 16-byte boundaries, got stride ",
          x.out.stride[0]);
}
template <std::same_as<LogProbsLocalGradient> X>
constexpr auto describe(const X*) {
  constexpr Axis kTiles{.name = "ceil(V / 256)", .of = "V", .follows = [](std::int64_t columns) {
                          return (columns + 255) / 256;
                        }};
  return part<LogProbsBackward>(
      "log_probs_local_gradient", kSm80 | kSm90 | kPlanes, log_probs_operands<X>(), log_probs_residuals<X>(),
      logits_gradient<X>(),
      optional("frames", &X::frames, {Axis{.name = "N"}, kTiles}, Type::kAccumulation).dense(),
      optional("log_probs", &X::log_probs, "N", Type::kAccumulation).dense().where(&check_frames),
      planes_of_operands<X>("N", "V", "D"), options(&X::options));
}

// The classes that each row keeps: bit c % 32 of a row's word c / 32 is set if it keeps class c.
struct KeptClasses {
  const std::uint32_t* words;  // [rows, words_of_row]; null: every row keeps all classes
  std::int64_t words_of_row;
  std::int64_t first_class;  // the class of column 0

  MR_HD bool some() const { return words != nullptr; }
  MR_HD bool keeps_class(std::int64_t row, std::int64_t c) const {
    return words[row * words_of_row + c / 32] >> (c % 32) & 1;
  }
  MR_HD bool operator()(std::int64_t row, std::int64_t column) const {
    return keeps_class(row, first_class + column);
  }
};
template <class Call>
KeptClasses kept_classes(const Call& x) {
  return {static_cast<const std::uint32_t*>(x.mask.data), x.mask.present() ? x.mask.size[1] : 0,
          x.options.first_class};
}

// The rows of log-probabilities. U: the type in which forward computes the statistics; they are stored as T.
template <class T, class U = T>
struct LogProbsRows {
  Targets target;
  RowVector<const T> temperatures;
  T inverse_temperature;  // for all rows, unless each has its own
  T *log_probs, *entropy, *lse, *lse_low;
  std::int64_t* top1;  // or null
  RowVector<T> grad_log_probs, grad_entropy, grad_lse;
  KeptClasses kept;

  // The target is a class that the row does not keep. Its log-probability is -inf and has no gradient.
  MR_HD bool lost(std::int64_t row) const {
    return kept.some() && target.valid(row) && !kept.keeps_class(row, target[row]);
  }
  MR_HD std::int64_t label(std::int64_t row) const { return target.label(row); }
  MR_HD T factor(std::int64_t row) const {
    if (!temperatures.data) return inverse_temperature;
    return is_temperature(temperatures[row]) ? T(1) / temperatures[row] : T(NAN);
  }
  MR_HD bool active(std::int64_t row) const { return !target.ignored(row); }
  MR_HD void skip(std::int64_t row) const {
    log_probs[row] = entropy[row] = lse[row] = lse_low[row] = T(0);
    if (top1) top1[row] = -1;
  }
  MR_HD void store(std::int64_t row, LogProbsStatistics<U> p) const {
    if (!active(row)) return skip(row);
    const LogNumber<T> words = rounded<T>(p.lse);
    lse[row] = words.high, lse_low[row] = words.low, entropy[row] = T(p.entropy);
    const U of_label = label(row) < 0 ? infinity<U>() : lost(row) ? -infinity<U>() : p.target - p.lse;
    log_probs[row] = target.valid(row) ? T(of_label) : T(NAN);
    // Tiles of tensor cores have -inf where a class is not kept, and the first of them for the largest score.
    const bool none = p.top < 0 || (kept.some() && p.lse.high == -infinity<U>());
    if (top1) top1[row] = none ? -1 : target.first_class + p.top;
  }
  // The entropy is not read if it has no gradient: a score of +inf makes it NaN, but not the other gradients.
  MR_HD LogProbsStatistics<T> product(std::int64_t row) const {
    return {{lse[row], lse_low[row]}, T(0), grad_entropy.data ? entropy[row] : T(0), -1};
  }
  MR_HD LogProbsUpstream<T> upstream(std::int64_t row) const {
    const T g = !target.valid(row) ? T(NAN) : lost(row) ? T(0) : grad_log_probs[row];
    return {grad_lse[row] - g, g, grad_entropy[row]};
  }
};

template <class T, class U = T, class Call>
[[gnu::always_inline]] inline LogProbsRows<T, U> log_probs_rows(const Call& x) {
  LogProbsRows<T, U> rows{.target = targets_of(x),
                          .temperatures = row_vector<const T>(x.temperatures),
                          .inverse_temperature = static_cast<T>(1 / x.options.temperature),
                          .log_probs = nullptr,
                          .entropy = static_cast<T*>(x.entropy.data),
                          .lse = static_cast<T*>(x.lse.data),
                          .lse_low = static_cast<T*>(x.lse_low.data),
                          .top1 = nullptr,
                          .grad_log_probs = {},
                          .grad_entropy = {},
                          .grad_lse = {},
                          .kept = kept_classes(x)};
  if constexpr (requires { x.top1; })
    rows.log_probs = static_cast<T*>(x.log_probs.data), rows.top1 = static_cast<std::int64_t*>(x.top1.data);
  if constexpr (requires { x.grad_entropy; }) {
    rows.grad_log_probs = row_vector<T>(x.grad_log_probs);
    rows.grad_entropy = row_vector<T>(x.grad_entropy), rows.grad_lse = row_vector<T>(x.grad_lse);
  }
  return rows;
}

// Calls run(monoid) with the monoid that the forward pass needs.
template <class R, class Run>
[[gnu::always_inline]] inline void with_log_probs(const LogProbsForward& x, Run run) {
  x.top1.present() ? run(TopLogProbs<R>{}) : run(LogProbs<R>{});
}

}  // namespace monoidreduce
