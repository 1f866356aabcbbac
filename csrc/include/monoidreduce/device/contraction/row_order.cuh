// The order in which a kernel takes the rows of a problem if some are not active (ignored targets, masked
// tokens).
#pragma once

#include <cstdint>

namespace monoidreduce {

// A kernel's rows are places in this order (FoldProblem::order): first the active rows, then the others,
// which are not computed. The operands are already gathered in this order; labels and statistics are indexed
// by the original row, order[place]. Only the device knows the number of active rows. In a product that sums
// over rows (dW), the places run along the width of the problem.
struct RowOrder {
  // [rows], from the problem's first place on; null: all rows are active, in their own order.
  const std::int64_t* order;
  const std::int64_t* all_counted;  // the number of active rows in all; null if order is
  int rows, first;                  // first: the problem's first place (FoldProblem::first_place)

  // The number of active rows among the problem's places.
  __device__ __forceinline__ int counted() const {
    return order == nullptr ? rows : ::min(::max(static_cast<int>(*all_counted) - first, 0), rows);
  }
  __device__ __forceinline__ std::int64_t operator[](int place) const {
    return order == nullptr ? first + place : order[place];
  }
};

}  // namespace monoidreduce
