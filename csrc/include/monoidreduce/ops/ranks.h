// Folds with columns split over the ranks of a process group: combines a row's results of all ranks, in the order of ranks.
// `states` [ranks, numbers, rows] has the results as each rank's forward pass left them.
//
// A rank's results are a state of the monoid that it folded with. The log-sum-exp of its columns is the frame, the mass
// is 1, and sums are measured from that frame. So the monoid's own combine and project finish them, in double: a
// log-sum-exp in two words of float has 48 bits.
#pragma once

#include <cmath>

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/ops/cross_entropy.h"
#include "monoidreduce/ops/log_probs.h"

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

struct CombinedLogSumExp {
  TensorView states;  // lse, lse_low
  TensorView lse, lse_low;
};
template <std::same_as<CombinedLogSumExp> X>
constexpr auto describe(const X*) {
  return helper("combine_logsumexp", kAnyCpu | kGpus, states_of<X>("W words=2 N"), combined_lse<X>());
}

// A rank's loss has neither z-loss nor a reduction: these are applied to the combined loss.
struct CombinedCrossEntropy {
  TensorView states;  // loss, loss_weight, lse, lse_low
  TensorView target;
  TensorView loss, reduced, lse, lse_low;
  // The target's softmax probability less 1, for CrossEntropyKeptGradients. Only where the loss is the target's alone.
  TensorView miss;
  double z_loss = 0;
  std::int64_t ignore_index = -100;
  bool mean = false;
};
template <std::same_as<CombinedCrossEntropy> X>
constexpr auto describe(const X*) {
  return helper("combine_cross_entropy", kAnyCpu | kGpus, states_of<X>("W numbers=4 N"),
                tensor("target", &X::target, "N", Type::kInt64),
                result("loss", &X::loss, "N", Type::kAccumulation),
                result("reduced", &X::reduced, "values=1", Type::kAccumulation).maybe(), combined_lse<X>(),
                result("miss", &X::miss, "N", Type::kAccumulation).maybe(), option("z_loss", &X::z_loss),
                option("ignore_index", &X::ignore_index), option("mean", &X::mean));
}

struct CombinedLogProbs {
  TensorView states;  // log_probs, entropy, lse, lse_low
  TensorView target, log_probs, entropy, lse, lse_low;
  std::int64_t ignore_index = -100;
};
template <std::same_as<CombinedLogProbs> X>
constexpr auto describe(const X*) {
  return helper("combine_log_probs", kAnyCpu | kGpus, states_of<X>("W numbers=4 N"),
                tensor("target", &X::target, "N", Type::kInt64),
                result("log_probs", &X::log_probs, "N", Type::kAccumulation),
                result("entropy", &X::entropy, "N", Type::kAccumulation), combined_lse<X>(),
                option("ignore_index", &X::ignore_index));
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

// The results of all ranks.
template <class T>
struct RankResults {
  const T* data;
  std::int64_t ranks, of_rank, of_field, of_row;  // strides
  using Softmax = LogSumExp<double>::State;

  MR_HD double operator()(std::int64_t rank, int field, std::int64_t row) const {
    return data[rank * of_rank + field * of_field + row * of_row];
  }
  // The state of a rank's columns from their log-sum-exp, in the two words from `field` on. It is the state of one element
  // with that score: the identity if it is -inf, as for a rank without columns.
  MR_HD Softmax softmax(std::int64_t rank, int field, std::int64_t row) const {
    const double high = (*this)(rank, field, row), low = (*this)(rank, field + 1, row);
    Element<double> all{};
    all.score = abs(high) == infinity<double>() ? high : high + low;
    return LogSumExp<double>{}.lift(all);
  }
};
template <class T>
RankResults<T> rank_results(const TensorView& t) {
  return {static_cast<const T*>(t.data), t.size[0], t.stride[0], t.stride[1], t.stride[2]};
}

// The policies below say which state the results of a rank are, and what is stored for the combined state.

template <class T>
struct CombinedLogSumExpRows {
  RankResults<T> results;
  LogSumExpRows<T> rows;
  LogSumExp<double> monoid;
  using State = LogSumExp<double>::State;

  MR_HD State state(std::int64_t rank, std::int64_t row) const { return results.softmax(rank, 0, row); }
  MR_HD void store(std::int64_t row, State s) const { rows.store(row, rounded<T>(monoid.project(s))); }
};
template <class T>
CombinedLogSumExpRows<T> combined_rows(const CombinedLogSumExp& x) {
  return {.results = rank_results<T>(x.states),
          .rows = {static_cast<T*>(x.lse.data), static_cast<T*>(x.lse_low.data), {}},
          .monoid = {}};
}

// Each class weighs as much in the state as in the loss. So the loss is the weighted sum of lse - score, which the sum of the
// weights moves from a rank's log-sum-exp to that of all classes.
template <class T>
struct CombinedCrossEntropyRows {
  RankResults<T> results;
  Targets target;
  T *loss, *lse, *lse_low, *miss;
  double z_loss;
  WeightedCrossEntropy<double> monoid;
  using State = WeightedCrossEntropy<double>::State;

  MR_HD State state(std::int64_t rank, std::int64_t row) const {
    State s = monoid.identity();
    s.lse = results.softmax(rank, 2, row), s.count = results(rank, 1, row);
    // Where all of a rank's scores are -inf, its own log-sum-exp leaves its loss undefined (NaN).
    const double undefined = s.count > 0 ? -infinity<double>() : 0.0;
    s.sum = s.lse.mass == 0 ? undefined : -results(rank, 0, row);
    return s;
  }
  MR_HD void store(std::int64_t row, State s) const {
    const LogNumber<double> all = monoid.softmax.project(s.lse);
    const LogNumber<T> words = rounded<T>(all);
    lse[row] = words.high, lse_low[row] = words.low;
    const bool ignored = target.ignored(row);
    const double value = monoid.below(s);
    loss[row] = ignored ? T(0) : T(value + (z_loss == 0 ? 0.0 : z_loss * all.high * all.high));
    if (miss) miss[row] = ignored ? T(0) : T(::expm1(-value));
  }
};
template <class T>
CombinedCrossEntropyRows<T> combined_rows(const CombinedCrossEntropy& x) {
  return {.results = rank_results<T>(x.states),
          .target = {.data = static_cast<const std::int64_t*>(x.target.data),
                     .stride = x.target.stride[0],
                     .ignore_index = x.ignore_index,
                     .classes = Targets::kAllColumns},
          .loss = static_cast<T*>(x.loss.data),
          .lse = static_cast<T*>(x.lse.data),
          .lse_low = static_cast<T*>(x.lse_low.data),
          .miss = static_cast<T*>(x.miss.data),
          .z_loss = x.z_loss,
          .monoid = {}};
}

// All scores of a row are measured from its largest log-sum-exp of a rank, so that the target's log-probability loses no
// digits to a large score.
template <class T>
struct CombinedLogProbsRows {
  RankResults<T> results;
  Targets target;
  T *log_probs, *entropy, *lse, *lse_low;
  LogProbs<double> monoid;
  using State = LogProbs<double>::State;

  MR_HD double origin(std::int64_t row) const {
    double largest = monoid.softmax.identity().frame;
    for (std::int64_t rank = 0; rank < results.ranks; ++rank)
      largest = monoid.softmax.join(largest, results.softmax(rank, 2, row).frame);
    return monoid.softmax.origin(largest);
  }
  MR_HD State state(std::int64_t rank, std::int64_t row) const {
    State s = monoid.identity();
    s.softmax = results.softmax(rank, 2, row);
    s.softmax.frame -= origin(row);
    s.sum = -results(rank, 1, row);
    // +inf: the target is not among the rank's classes. Where all of a rank's scores are -inf, the target's is.
    const double log_prob = results(rank, 0, row);
    if (log_prob != infinity<double>())
      s.target = s.softmax.mass == 0 ? -infinity<double>() : s.softmax.frame + log_prob;
    return s;
  }
  MR_HD void store(std::int64_t row, State s) const {
    if (target.ignored(row)) {
      log_probs[row] = entropy[row] = lse[row] = lse_low[row] = T(0);
      return;
    }
    const LogProbsStatistics<double> p = monoid.project(s);
    const LogNumber<T> words = rounded<T>(LogNumber<double>{origin(row), 0.0} + p.lse);
    lse[row] = words.high, lse_low[row] = words.low;
    log_probs[row] = T(p.target - p.lse), entropy[row] = T(p.entropy);
  }
};
template <class T>
CombinedLogProbsRows<T> combined_rows(const CombinedLogProbs& x) {
  return {.results = rank_results<T>(x.states),
          .target = {.data = static_cast<const std::int64_t*>(x.target.data),
                     .stride = x.target.stride[0],
                     .ignore_index = x.ignore_index,
                     .classes = Targets::kAllColumns},
          .log_probs = static_cast<T*>(x.log_probs.data),
          .entropy = static_cast<T*>(x.entropy.data),
          .lse = static_cast<T*>(x.lse.data),
          .lse_low = static_cast<T*>(x.lse_low.data),
          .monoid = {}};
}

template <class T>
struct CombinedDistillationRows {
  RankResults<T> results;
  DistillationRows<T> rows;
  NamedDistillation<double> monoid;
  using State = DistillationState<double>;

  MR_HD State state(std::int64_t rank, std::int64_t row) const {
    State s = monoid.identity();
    s.p = results.softmax(rank, 1, row), s.q.softmax = results.softmax(rank, 3, row);
    // Where all of a rank's scores under P are -inf, so is every log P, and the loss that it found is undefined (NaN).
    if (s.q.softmax.mass != 0) s.q.sum = s.p.mass == 0 ? infinity<double>() : results(rank, 0, row);
    return s;
  }
  MR_HD void store(std::int64_t row, State s) const {
    const DistillationOutput<double> p = monoid.project(s);
    rows.store(row, {rounded<T>(p.p_lse), rounded<T>(p.q_lse), rounded<T>(p.centre), T(p.loss)});
  }
};
template <class T>
CombinedDistillationRows<T> combined_rows(const CombinedDistillation& x) {
  return {.results = rank_results<T>(x.states),
          .rows = {.mask = static_cast<const bool*>(x.mask.data),
                   .mask_stride = x.mask.stride[0],
                   .rows = x.loss.size[0],
                   .loss = static_cast<T*>(x.loss.data),
                   .stats = static_cast<T*>(x.stats.data),
                   .grad_loss = {}},
          .monoid = {{}, x.kind}};
}

// Combines a row's states in the order of ranks, and stores the result.
template <class Rows>
MR_HD void combine_row(const Rows& rows, std::int64_t row) {
  typename Rows::State all = rows.monoid.identity();
  for (std::int64_t rank = 0; rank < rows.results.ranks; ++rank)
    all = combine(rows.monoid, all, rows.state(rank, row));
  rows.store(row, all);
}

}  // namespace monoidreduce
