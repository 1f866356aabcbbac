// The row policies (traits.h) of the other operators; that of cross entropy is beside its call (ops/cross_entropy.h). T is the accumulation type: float, or double for float64 tensors.
#pragma once

#include "monoidreduce/fold.h"
#include "monoidreduce/monoids/distillation.h"
#include "monoidreduce/operators.h"

namespace monoidreduce {

// attention, logsumexp_matmul: P_i is lse_i, in two words. With a payload, centre is g_lse - <G, out>; without one it is
// g_lse, and grad_lse is not read.
template <class T>
struct LogSumExpRows {
  T *lse, *lse_low;  // [rows], natural logarithm
  RowVector<T> centre, grad_lse = {};
  const T* sinks = nullptr;  // [heads], of attention; or null
  MR_HD bool active(std::int64_t) const { return true; }
  MR_HD std::int64_t label(std::int64_t) const { return -1; }
  MR_HD bool has_sinks() const { return sinks != nullptr; }
  MR_HD T sink(std::int64_t head) const { return sinks[head]; }
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
