// In which order a kernel takes the rows of a problem, where some of them do not count.
#pragma once

#include <cstdint>

#include "monoidreduce/fold.h"

namespace monoidreduce {

// A kernel's rows are places in this order (FoldProblem::order), in which operands lie already: the rows that count, then the
// others, which are not computed. How many count is known on the device alone. What is known of a row is found by its number.
// In a product over rows, its width are the places.
struct RowOrder {
  const std::int64_t* order;  // of the first of these places; null: all rows count, and are taken as they lie
  const std::int64_t* all_counted;
  std::int64_t all;
  int rows, first;

  RowOrder(const TensorView& view, std::int64_t rows, std::int64_t first = 0)
      : order(static_cast<const std::int64_t*>(view.data)),
        all_counted(nullptr),
        all(view.size[0] - 1),
        rows(static_cast<int>(rows)),
        first(static_cast<int>(first)) {
    if (order != nullptr) all_counted = order + all, order += first;
  }
  explicit RowOrder(const FoldProblem& p) : RowOrder(p.order, p.rows(), p.first_place) {}

  // Of these places.
  __device__ __forceinline__ int counted() const {
    return order == nullptr ? rows : ::min(::max(static_cast<int>(*all_counted) - first, 0), rows);
  }
  __device__ __forceinline__ bool all_count() const { return order == nullptr || *all_counted == all; }
  __device__ __forceinline__ std::int64_t operator[](int place) const {
    return order == nullptr ? first + place : order[place];
  }
};

}  // namespace monoidreduce
