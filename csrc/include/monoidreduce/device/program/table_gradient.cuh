// The gradient of the tables that a user's function of scores reads (P::kGathers, score_element.h), summed by the
// backward kernels of attention:
//
//   d_table[t] = sum of dS_ij * d score_ij / d gathered_n   over the elements (i, j) whose gather n reads entry t
//
// for gathers whose entry depends on the key. (Those of others are sums over a row's keys, and a fold of their own
// computes them: monoidreduce/folds/table_gradient.py.)
//
// Additions to the same entry are done one after another. So where all elements of a column read one entry, lanes
// sum them first, and one of them adds the sum: fragment_table_gradient.cuh in the tensor-core kernels. Other
// entries may be the same for most elements too, such as that of all distances beyond the last (EntrySum).
//
// In deterministic mode the sums are integers: of 64 bits, in a unit that the largest addend of all fits, which a
// launch before finds.
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

// Sums of integers do not depend on the order of their addends, and neither do sums of infinities and NaNs.
template <class T>
__device__ __forceinline__ void add_integer(const ModifiedScoresData& data, int entry, T addend) {
  using Unsigned = unsigned long long;
  auto* const integers = reinterpret_cast<Unsigned*>(data.integers);
  const bool finite = fabsf(addend) < INFINITY;
  if (data.per_unit == nullptr) {
    const Unsigned size = __float_as_uint(fabsf(addend));
    // Few addends are larger than all before, and a read does not wait for others.
    if (finite && size > *reinterpret_cast<volatile Unsigned*>(integers)) atomicMax(integers, size);
  } else if (finite) {
    atomicAdd(integers + entry, static_cast<Unsigned>(__float2ll_rn(addend * *data.per_unit)));
  } else {
    atomicAdd(static_cast<T*>(data.d_table) + entry, addend);
  }
}

template <class P, class T>
__device__ __forceinline__ void add_to_entry(const ModifiedScoresData& data, Index<T> entry, T addend) {
  if (addend == T(0) || data.d_table == nullptr) return;
  if constexpr (P::kInteger)
    add_integer(data, entry, addend);
  else
    atomicAdd(static_cast<T*>(data.d_table) + entry, addend);
}

// Sums what a thread's consecutive elements add to the same entry; at the end, what all lanes of a warp do.
template <class P, class T>
struct EntrySum {
  Index<T> entry = 0;
  T sum = T(0);

  __device__ __forceinline__ void add(const ModifiedScoresData& data, Index<T> to, T gradient) {
    if (to != entry) add_to_entry<P, T>(data, entry, sum), entry = to, sum = T(0);
    sum += gradient;
  }
  // Called by all lanes of a warp.
  __device__ __forceinline__ void finish(const ModifiedScoresData& data) const {
    const Index<T> most = reduce_lanes<32>(entry, [](auto a, auto b) { return a > b ? a : b; });
    if (__any_sync(~0u, entry != most)) return add_to_entry<P, T>(data, entry, sum);
    const T of_warp = reduce_lanes<32>(sum, AddNumbers{});
    if (threadIdx.x % 32 == 0) add_to_entry<P, T>(data, entry, of_warp);
  }
};

}  // namespace monoidreduce
