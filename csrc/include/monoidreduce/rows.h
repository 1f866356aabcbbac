// The row policies (fold.h) of the operators. T is the accumulation type: float, or double for float64 tensors.
#pragma once

#include "monoidreduce/fold.h"
#include "monoidreduce/monoids/cross_entropy.h"
#include "monoidreduce/monoids/distillation.h"
#include "monoidreduce/operators.h"

namespace monoidreduce {

// A row statistic with any stride; absent (null) reads as 0.
template <class T>
struct RowVector {
  T* data = nullptr;
  std::int64_t stride = 1;
  MR_HD T operator[](std::int64_t row) const { return data ? data[row * stride] : T(0); }
};

// attention, logsumexp_matmul: P_i is lse_i, in two words. With a payload, centre is g_lse - <G, out>; without one it is
// g_lse, and grad_lse is not read.
template <class T>
struct LogSumExpRows {
  T *lse, *lse_low;  // [rows], natural logarithm
  RowVector<T> centre, grad_lse = {};
  MR_HD bool active(std::int64_t) const { return true; }
  MR_HD std::int64_t label(std::int64_t) const { return -1; }
  MR_HD void store(std::int64_t row, LogNumber<T> p) const { lse[row] = p.high, lse_low[row] = p.low; }
  MR_HD LogNumber<T> product(std::int64_t row) const {
    return {softmax_product(lse[row], centre[row]), lse_low[row]};
  }
  MR_HD T upstream(std::int64_t row) const { return centre[row]; }
  MR_HD T of_product(std::int64_t row) const { return grad_lse[row]; }
};

// mlp: rows have no statistics.
template <class T>
struct SumRows {
  MR_HD bool active(std::int64_t) const { return true; }
  MR_HD std::int64_t label(std::int64_t) const { return -1; }
  MR_HD void store(std::int64_t, T) const {}
  MR_HD T product(std::int64_t) const { return T(0); }
  MR_HD T upstream(std::int64_t) const { return T(0); }
};

// U: the type in which forward computes the statistics; they are stored as T.
template <class T, class U = T>
struct CrossEntropyRows {
  const std::int64_t* target;  // [rows]
  std::int64_t target_stride, ignore_index;
  std::int64_t classes;
  CrossEntropyLoss<T> rule;
  T *loss, *lse, *lse_low;  // [rows]; both words of lse are read by backward
  RowVector<T> grad_loss, grad_lse;
  using Output = typename CrossEntropy<T>::Output;
  using Upstream = typename CrossEntropy<T>::Upstream;

  MR_HD std::int64_t label(std::int64_t row) const { return target[row * target_stride]; }
  MR_HD bool ignored(std::int64_t row) const { return label(row) == ignore_index; }
  MR_HD bool active(std::int64_t row) const { return !ignored(row) || grad_lse.data; }
  // A target out of range makes its row NaN: on a GPU, raising an error would have to synchronize.
  MR_HD bool valid(std::int64_t row) const { return label(row) >= 0 && label(row) < classes; }
  MR_HD void store(std::int64_t row, typename CrossEntropy<U>::Output p) const {
    const CrossEntropyLoss<U> wide{U(rule.smoothing), U(rule.z_loss)};
    const LogNumber<T> kept = rounded<T>(p.lse);
    lse[row] = kept.high, lse_low[row] = kept.low;
    loss[row] = ignored(row) ? T(0) : valid(row) ? T(wide.value(p)) : T(NAN);
  }
  MR_HD Output product(std::int64_t row) const {
    return {.lse = {lse[row], lse_low[row]}, .target = T(0), .mean = {T(0), T(0)}, .count = 0};
  }
  MR_HD Upstream upstream(std::int64_t row) const {
    const T g = ignored(row) ? T(0) : valid(row) ? grad_loss[row] : T(NAN);
    return rule.upstream(lse[row], T(classes), g, grad_lse[row]);
  }
};

template <class T>
struct DistillationRows {
  const bool* mask;  // [rows], false: the row is not active; null: all rows are active
  std::int64_t mask_stride, rows;
  T* loss;   // [rows]
  T* stats;  // [6, rows]: p's lse, q's lse and the centre, each high and low
  RowVector<T> grad_loss;
  using Output = DistillationOutput<T>;

  MR_HD bool active(std::int64_t row) const { return !mask || mask[row * mask_stride]; }
  MR_HD std::int64_t label(std::int64_t) const { return -1; }
  MR_HD void store(std::int64_t row, Output p) const {
    stats[row] = p.p_lse.high, stats[rows + row] = p.p_lse.low;
    stats[2 * rows + row] = p.q_lse.high, stats[3 * rows + row] = p.q_lse.low;
    stats[4 * rows + row] = p.centre.high, stats[5 * rows + row] = p.centre.low;
    loss[row] = active(row) ? p.loss : T(0);
  }
  MR_HD Output product(std::int64_t row) const {
    return {{stats[row], stats[rows + row]},
            {stats[2 * rows + row], stats[3 * rows + row]},
            {stats[4 * rows + row], stats[5 * rows + row]},
            T(0)};
  }
  MR_HD T upstream(std::int64_t row) const { return grad_loss[row]; }
};

// Which tokens are active: those that a mean of losses is taken over.
class CountedTokens {
 public:
  template <class Arguments>  // LossReduction, RowOrdering
  explicit CountedTokens(const Arguments& x)
      : target_{static_cast<const std::int64_t*>(x.target.data), x.target.stride[0]},
        mask_{static_cast<const bool*>(x.mask.data), x.mask.stride[0]},
        ignore_index_(x.ignore_index) {}

  MR_HD bool operator()(std::int64_t token) const {
    return (!target_.data || target_[token] != ignore_index_) && (!mask_.data || mask_[token]);
  }

 private:
  RowVector<const std::int64_t> target_;
  RowVector<const bool> mask_;
  std::int64_t ignore_index_;
};

}  // namespace monoidreduce
