// The gradient of tables (program/table_gradient.cuh) in the SIMT kernels.
#pragma once

#include "monoidreduce/device/program/table_gradient.cuh"

namespace monoidreduce::simt {

// A thread has some elements of one row. kColumn is as kElement: neighbouring elements are of other columns.
template <class P, class T>
struct LaneTableGradient {
  const TableEntries<P::kTableSum, T> entries;
  EntrySum<T> sums[P::kGathers];

  // at: an element, its dot product, and the derivative with respect to its score.
  template <class At>
  __device__ __forceinline__ void operator()(const At& at, T dot, T g) {
    add<0>(at.element(dot), g);
  }
  __device__ __forceinline__ void finish() const {
#pragma unroll
    for (const EntrySum<T>& sum : sums) sum.finish(entries);
  }

 private:
  template <int n, class Element>
  __device__ __forceinline__ void add(const Element& e, T g) {
    if constexpr (n < P::kGathers) {
      const T gradient = g == T(0) ? T(0) : g * P::template by_gathered<n>(e);
      sums[n].add(entries, P::template entry<n>(e), gradient);
      add<n + 1>(e, g);
    }
  }
};

}  // namespace monoidreduce::simt
