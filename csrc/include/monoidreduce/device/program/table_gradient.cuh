// The gradient of the tables that a user's function of scores reads (P::kGathers, score_element.h), summed by the
// backward kernels of attention:
//
//   d_table[t] = sum of dS_ij * d score_ij / d gathered_n   over the elements (i, j) whose gather n reads entry t
//
// The kernels do this for gathers whose index includes the key. The gradient of any other gather is a sum over the
// keys of each row, and a fold computes it (monoidreduce/folds/table_gradient.py).
//
// Additions to the same entry are done one after another. So where all elements of a column read one entry, lanes
// sum them first, and one of them adds the sum: fragment_table_gradient.cuh in the tensor-core kernels. Other
// entries may be the same for most elements too, such as that of all distances beyond the last (EntrySum).
#pragma once

#include "monoidreduce/device/program/score_element.h"
#include "monoidreduce/device/warp/lanes.cuh"

namespace monoidreduce {

struct AddNumbers {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

template <class T>
__device__ __forceinline__ void add_to_entry(void* d_table, Index<T> entry, T gradient) {
  if (gradient != T(0)) atomicAdd(static_cast<T*>(d_table) + entry, gradient);
}

// Sums what a thread's consecutive elements add to the same entry; at the end, what all lanes of a warp do.
template <class T>
struct EntrySum {
  Index<T> entry = 0;
  T sum = T(0);

  __device__ __forceinline__ void add(void* d_table, Index<T> to, T gradient) {
    if (to != entry) add_to_entry(d_table, entry, sum), entry = to, sum = T(0);
    sum += gradient;
  }
  // Called by all lanes of a warp.
  __device__ __forceinline__ void finish(void* d_table) const {
    const Index<T> most = reduce_lanes<32>(entry, [](auto a, auto b) { return a > b ? a : b; });
    if (__any_sync(~0u, entry != most)) return add_to_entry(d_table, entry, sum);
    const T of_warp = reduce_lanes<32>(sum, AddNumbers{});
    if (threadIdx.x % 32 == 0) add_to_entry(d_table, entry, of_warp);
  }
};

}  // namespace monoidreduce
