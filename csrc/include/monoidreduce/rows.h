// Row policies (traits.h) of attention, logsumexp_matmul, the MLP and distillation. Those of cross entropy and of
// log-probabilities are beside their calls (ops/cross_entropy.h, ops/log_probs.h). T is the accumulation type: float, or
// double for float64 tensors.
#pragma once

#include "monoidreduce/fold.h"
#include "monoidreduce/monoids/distillation.h"
#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce {

// A number per row, with any stride. If absent (null), it reads as 0.
template <class T>
struct RowVector {
  T* data = nullptr;
  std::int64_t stride = 1;
  MR_HD T operator[](std::int64_t row) const { return data ? data[row * stride] : T(0); }
};
template <class T>
[[gnu::always_inline]] inline RowVector<T> row_vector(const TensorView& t) {
  return {static_cast<T*>(t.data), t.stride[0]};
}

// attention, logsumexp_matmul: P_i is lse_i, in two words. For attention, centre is g_lse - delta, with
// delta = <grad_out, out>. For logsumexp_matmul, centre is g_lse, and grad_lse is not read.
template <class T>
struct LogSumExpRows {
  T *lse, *lse_low;  // [rows], natural logarithm
  RowVector<T> centre, grad_lse = {};
  const T* sinks = nullptr;  // [heads], attention sinks; or null
  MR_HD bool active(std::int64_t) const { return true; }
  MR_HD std::int64_t label(std::int64_t) const { return -1; }
  MR_HD bool has_sinks() const { return sinks != nullptr; }
  MR_HD T sink(std::int64_t head) const { return sinks[head]; }
  MR_HD void store(std::int64_t row, LogNumber<T> p) const { lse[row] = p.high, lse_low[row] = p.low; }
  MR_HD LogNumber<T> product(std::int64_t row) const {
    return {softmax_product(lse[row], centre[row]), lse_low[row]};
  }
  MR_HD T upstream(std::int64_t row) const { return centre[row]; }
  MR_HD T product_gradient(std::int64_t row) const { return grad_lse[row]; }
};

// mlp: a row has no statistics to store.
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
  T* stats;  // [6, rows]: lse of P, lse of Q, lse of P less the loss (centre); a high and a low word each
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

}  // namespace monoidreduce
