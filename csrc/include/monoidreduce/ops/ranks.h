// Folds with columns split over the ranks of a process group: combines a row's results of all ranks, in the order of ranks.
// `states` [ranks, numbers, rows] has the results as each rank's forward pass left them.
#pragma once

#include <cmath>

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/monoids/products.h"
#include "monoidreduce/ops/cross_entropy.h"

namespace monoidreduce {

template <class Call>
constexpr auto states_of(const char* shape) {
  return tensor("states", &Call::states, shape);
}
template <class Call>
constexpr auto combined_lse() {
  return fields(result("lse", &Call::lse, "N", Type::kAccumulation),
                result("lse_low", &Call::lse_low, "N", Type::kAccumulation));
}

// How classes are split over ranks: of `all` classes, rank r has those from r * stride on, at most `stride` of them.
struct RankedClasses {
  std::int64_t stride = 1, all = 0;
  MR_HD bool has(std::int64_t rank, std::int64_t target) const {
    return rank * stride <= target && target < (rank + 1) * stride;
  }
  MR_HD double count(std::int64_t rank) const {
    const std::int64_t left = all - rank * stride;
    return static_cast<double>(left < 0 ? 0 : left < stride ? left : stride);
  }
};
inline bool positive(std::int64_t n) { return n > 0; }
template <class Call>
constexpr auto ranked_classes() {
  return fields(option("stride", &Call::stride, "an int > 0", &positive),
                option("classes", &Call::classes, "an int >= 0", [](std::int64_t n) { return n >= 0; }));
}
template <class Call>
RankedClasses classes_of(const Call& x) {
  return {x.stride, x.classes};
}

struct CombinedLogSumExp {
  TensorView states;  // lse, lse_low
  TensorView lse, lse_low;
};
template <std::same_as<CombinedLogSumExp> X>
constexpr auto describe(const X*) {
  return helper("combine_logsumexp", kAnyCpu | kGpus, states_of<X>("W words=2 N"), combined_lse<X>());
}

// A rank's loss has label smoothing in it, but neither z-loss nor a reduction: these are applied to the combined loss.
// label_smoothing tells with which weights a rank's classes count in its loss.
struct CombinedCrossEntropy {
  TensorView states;  // loss, lse, lse_low
  TensorView target;
  TensorView class_weight;  // as in CrossEntropyForward
  TensorView class_sums;    // the sum of each rank's class weights; absent: its number of classes
  TensorView loss, reduced, lse, lse_low;
  TensorView miss;  // the target's softmax probability less 1, for CrossEntropyKeptGradients
  double label_smoothing = 0, z_loss = 0;
  std::int64_t stride = 1, classes = 0, ignore_index = -100;
  bool mean = false;
};
inline void check_miss(const CombinedCrossEntropy& x) {
  require(!x.miss.present() || (!x.class_weight.present() && x.label_smoothing == 0),
          "miss: expected none beside class weights or label smoothing, got a tensor");
}
inline void check_all_weights(const CombinedCrossEntropy& x) {
  require(!x.class_weight.present() || x.class_weight.size[0] == class_weights(x.classes),
          "class_weight: expected ", x.classes, " weights and their mean, got shape [",
          x.class_weight.size[0], "]");
}
template <std::same_as<CombinedCrossEntropy> X>
constexpr auto describe(const X*) {
  return helper("combine_cross_entropy", kAnyCpu | kGpus, states_of<X>("W numbers=3 N"),
                tensor("target", &X::target, "N", Type::kInt64),
                optional("class_weight", &X::class_weight, "weights", Type::kAccumulation)
                    .dense()
                    .where(&check_all_weights),
                optional("class_sums", &X::class_sums, "W", Type::kAccumulation).dense(),
                result("loss", &X::loss, "N", Type::kAccumulation),
                result("reduced", &X::reduced, "values=1", Type::kAccumulation).maybe(), combined_lse<X>(),
                result("miss", &X::miss, "N", Type::kAccumulation).maybe().where(&check_miss),
                option("label_smoothing", &X::label_smoothing), option("z_loss", &X::z_loss),
                ranked_classes<X>(), option("ignore_index", &X::ignore_index), option("mean", &X::mean));
}

struct CombinedLogProbs {
  TensorView states;  // log_probs, entropy, lse, lse_low
  TensorView target, log_probs, entropy, lse, lse_low;
  std::int64_t stride = 1, classes = 0, ignore_index = -100;
};
template <std::same_as<CombinedLogProbs> X>
constexpr auto describe(const X*) {
  return helper("combine_log_probs", kAnyCpu | kGpus, states_of<X>("W numbers=4 N"),
                tensor("target", &X::target, "N", Type::kInt64),
                result("log_probs", &X::log_probs, "N", Type::kAccumulation),
                result("entropy", &X::entropy, "N", Type::kAccumulation), combined_lse<X>(),
                ranked_classes<X>(), option("ignore_index", &X::ignore_index));
}

struct CombinedDistillation {
  TensorView states;  // loss; lse of P and lse of Q, in two words each
  TensorView mask, loss, reduced;
  TensorView stats;  // as in DistillationForward
  DistillationLoss kind = DistillationLoss::kCrossEntropy;
  bool mean = false;
};
template <std::same_as<CombinedDistillation> X>
constexpr auto describe(const X*) {
  return helper("combine_distillation", kAnyCpu | kGpus, states_of<X>("W numbers=5 N"),
                optional("mask", &X::mask, "N", Type::kBool),
                result("loss", &X::loss, "N", Type::kAccumulation),
                result("reduced", &X::reduced, "values=1", Type::kAccumulation).maybe(),
                result("stats", &X::stats, "statistics=6 N", Type::kAccumulation),
                choice("kind", &X::kind, "0, 1 or 2", kDistillationLossNames), option("mean", &X::mean));
}

// The policies below say how a row's state on one rank is read, and what is stored for the combined state.

template <class T>
struct RankStates {
  const T* data;
  std::int64_t ranks, of_rank, of_field, of_row;  // strides
  MR_HD double operator()(std::int64_t rank, int field, std::int64_t row) const {
    return data[rank * of_rank + field * of_field + row * of_row];
  }
  // The log-sum-exp in the two words from `field` on.
  MR_HD double lse(std::int64_t rank, int field, std::int64_t row) const {
    const double high = (*this)(rank, field, row), low = (*this)(rank, field + 1, row);
    return abs(high) == infinity<double>() ? high : high + low;
  }
};
template <class T>
RankStates<T> rank_states(const TensorView& t) {
  return {static_cast<const T*>(t.data), t.size[0], t.stride[0], t.stride[1], t.stride[2]};
}

// A double in two words of T.
template <class T>
MR_HD LogNumber<T> in_words(double x) {
  const T high = T(x);
  return {high, T(low_word(x, double(high)))};
}

template <class T>
struct CombinedLogSumExpRows {
  RankStates<T> states;
  T *lse, *lse_low;
  using Monoid = LogSumExpProduct;
  using State = Monoid::State;

  MR_HD Monoid monoid() const { return {}; }
  MR_HD State state(std::int64_t rank, std::int64_t row) const { return {states.lse(rank, 0, row)}; }
  MR_HD void store(std::int64_t row, State s) const {
    const LogNumber<T> words = in_words<T>(s.lse);
    lse[row] = words.high, lse_low[row] = words.low;
  }
};
template <class T>
CombinedLogSumExpRows<T> combined_rows(const CombinedLogSumExp& x) {
  return {rank_states<T>(x.states), static_cast<T*>(x.lse.data), static_cast<T*>(x.lse_low.data)};
}

template <class T>
struct CombinedCrossEntropyRows {
  RankStates<T> states;
  Targets target;
  RankedClasses classes;
  const T *class_weight, *class_sums;
  T *loss, *lse, *lse_low, *miss;
  double smoothing, z_loss;
  using Monoid = CrossEntropyProduct;
  using State = Monoid::State;

  MR_HD Monoid monoid() const { return {}; }
  // The sum of the weights with which a rank's classes count in a row's loss.
  MR_HD double weight(std::int64_t rank, std::int64_t row) const {
    double hard = classes.has(rank, target[row]);
    if (class_weight && target.valid(row)) hard *= class_weight[1 + target[row]];
    if (smoothing == 0) return hard;
    const double soft = class_sums ? double(class_sums[rank]) : classes.count(rank);
    return (1 - smoothing) * hard + smoothing * soft / static_cast<double>(classes.all < 1 ? 1 : classes.all);
  }
  MR_HD State state(std::int64_t rank, std::int64_t row) const {
    return {states.lse(rank, 1, row), states(rank, 0, row), weight(rank, row)};
  }
  MR_HD void store(std::int64_t row, State s) const {
    const LogNumber<T> words = in_words<T>(s.lse);
    lse[row] = words.high, lse_low[row] = words.low;
    const bool ignored = target.ignored(row);
    loss[row] = ignored ? T(0) : T(s.loss + (z_loss == 0 ? 0.0 : z_loss * s.lse * s.lse));
    if (miss) miss[row] = ignored ? T(0) : T(::expm1(-s.loss));
  }
};
template <class T>
CombinedCrossEntropyRows<T> combined_rows(const CombinedCrossEntropy& x) {
  return {.states = rank_states<T>(x.states),
          .target = {.data = static_cast<const std::int64_t*>(x.target.data),
                     .stride = x.target.stride[0],
                     .ignore_index = x.ignore_index,
                     .classes = x.classes},
          .classes = classes_of(x),
          .class_weight = static_cast<const T*>(x.class_weight.data),
          .class_sums = static_cast<const T*>(x.class_sums.data),
          .loss = static_cast<T*>(x.loss.data),
          .lse = static_cast<T*>(x.lse.data),
          .lse_low = static_cast<T*>(x.lse_low.data),
          .miss = static_cast<T*>(x.miss.data),
          .smoothing = x.label_smoothing,
          .z_loss = x.z_loss};
}

template <class T>
struct CombinedLogProbsRows {
  RankStates<T> states;
  Targets target;
  RankedClasses classes;
  T *log_probs, *entropy, *lse, *lse_low;
  using Monoid = LogProbsProduct;
  using State = Monoid::State;

  MR_HD Monoid monoid() const { return {}; }
  MR_HD State state(std::int64_t rank, std::int64_t row) const {
    const double weight = classes.has(rank, target[row]);
    return {{states.lse(rank, 2, row), -states(rank, 0, row), weight}, states(rank, 1, row)};
  }
  MR_HD void store(std::int64_t row, State s) const {
    if (target.ignored(row)) {
      log_probs[row] = entropy[row] = lse[row] = lse_low[row] = T(0);
      return;
    }
    const LogNumber<T> words = in_words<T>(s.loss.lse);
    lse[row] = words.high, lse_low[row] = words.low;
    log_probs[row] = T(-s.loss.loss), entropy[row] = T(s.entropy);
  }
};
template <class T>
CombinedLogProbsRows<T> combined_rows(const CombinedLogProbs& x) {
  return {.states = rank_states<T>(x.states),
          .target = {.data = static_cast<const std::int64_t*>(x.target.data),
                     .stride = x.target.stride[0],
                     .ignore_index = x.ignore_index,
                     .classes = x.classes},
          .classes = classes_of(x),
          .log_probs = static_cast<T*>(x.log_probs.data),
          .entropy = static_cast<T*>(x.entropy.data),
          .lse = static_cast<T*>(x.lse.data),
          .lse_low = static_cast<T*>(x.lse_low.data)};
}

template <class T>
struct CombinedDistillationRows {
  RankStates<T> states;
  RowVector<const bool> mask;
  DistillationLoss kind;
  std::int64_t rows;
  T *loss, *stats;  // stats: [6, rows]
  using Monoid = DistillationProduct;
  using State = Monoid::State;

  MR_HD Monoid monoid() const { return {kind}; }
  MR_HD State state(std::int64_t rank, std::int64_t row) const {
    return {states.lse(rank, 1, row), states.lse(rank, 3, row), states(rank, 0, row)};
  }
  MR_HD void store(std::int64_t row, State s) const {
    const LogNumber<T> words[] = {in_words<T>(s.p), in_words<T>(s.q), in_words<T>(s.p - s.loss)};
    for (int n = 0; n < 3; ++n)
      stats[2 * n * rows + row] = words[n].high, stats[(2 * n + 1) * rows + row] = words[n].low;
    loss[row] = mask.data && !mask[row] ? T(0) : T(s.loss);
  }
};
template <class T>
CombinedDistillationRows<T> combined_rows(const CombinedDistillation& x) {
  return {.states = rank_states<T>(x.states),
          .mask = {static_cast<const bool*>(x.mask.data), x.mask.stride[0]},
          .kind = x.kind,
          .rows = x.loss.size[0],
          .loss = static_cast<T*>(x.loss.data),
          .stats = static_cast<T*>(x.stats.data)};
}

// Combines a row's states in the order of ranks, and stores the result.
template <class Rows>
MR_HD void combine_row(const Rows& rows, std::int64_t row) {
  const auto monoid = rows.monoid();
  typename Rows::State all = monoid.identity();
  for (std::int64_t rank = 0; rank < rows.states.ranks; ++rank)
    all = monoid.combine(all, rows.state(rank, row));
  rows.store(row, all);
}

}  // namespace monoidreduce
