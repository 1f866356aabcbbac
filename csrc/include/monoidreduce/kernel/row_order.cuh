// In which order a kernel takes the rows of a problem, where some of them do not count.
#pragma once

#include <cstdint>

#include "monoidreduce/fold.h"

namespace monoidreduce {

// A kernel's rows are places in this order (FoldProblem::order), in which operands lie already: the rows that count, then the
// others, which are not computed. How many count is known on the device alone. What is known of a row is found by its number.
// In a product over rows, its width are the places.
struct RowOrder {
  const std::int64_t* order;  // null: all count, and are taken as they lie
  int rows;

  RowOrder(const TensorView& order, std::int64_t rows)
      : order(static_cast<const std::int64_t*>(order.data)), rows(static_cast<int>(rows)) {}
  explicit RowOrder(const FoldProblem& p) : RowOrder(p.order, p.rows()) {}

  __device__ __forceinline__ int counted() const {
    return order == nullptr ? rows : static_cast<int>(order[rows]);
  }
  __device__ __forceinline__ std::int64_t operator[](int place) const {
    return order == nullptr ? place : order[place];
  }
};

}  // namespace monoidreduce
