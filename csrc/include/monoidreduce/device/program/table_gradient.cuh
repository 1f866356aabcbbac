// The gradient of the tables that a user's function of scores reads (P::kGathers, score_element.h), summed by the
// backward kernels of attention:
//
//   d_table[t] = sum of dS_ij * d score_ij / d gathered_n   over the elements (i, j) whose gather n reads entry t
//
// The kernels do this for gathers whose index includes the key. The gradient of any other gather is a sum over the
// keys of each row, and a fold computes it (monoidreduce/folds/table_gradient.py). Kernels for planes sum these too.
//
// Additions to the same entry are done one after another. So where all elements of a column read one entry, lanes
// sum them first, and one of them adds the sum: fragment_table_gradient.cuh in the tensor-core kernels. Other
// entries may be the same for most elements too, such as that of all distances beyond the last (EntrySum).
//
// The sum of floats depends on the order of additions, that of integers does not. So in the deterministic mode the
// kernels run twice. The first run finds the largest addend of each entry. It determines a unit, and the second
// run adds multiples of it (monoidreduce/folds/integer_sums.py).
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

// The entries of the table of reals, to which gradients are added.
template <TableSum kSum, class T>
struct TableEntries {
  T* of_entries;  // kFloats: sums. kLargest: the largest absolute addends. kIntegers: factors, 0 for no integers
  std::int64_t* integers;  // kIntegers alone: sums of addends times factors

  __device__ __forceinline__ explicit TableEntries(const ModifiedScoresData& x)
      : of_entries(static_cast<T*>(x.d_table)), integers(x.table_integers) {}
  __device__ __forceinline__ void add(Index<T> entry, T gradient) const {
    if (gradient == T(0)) return;
    if constexpr (kSum == TableSum::kFloats) {
      atomicAdd(of_entries + entry, gradient);
    } else if constexpr (kSum == TableSum::kLargest) {
      // Floats that are not negative compare as their bits do, read as integers. NaN compares as larger than infinity.
      atomicMax(reinterpret_cast<unsigned*>(of_entries) + entry, __float_as_uint(fabsf(gradient)));
    } else if (const float factor = of_entries[entry]; factor != 0.f) {
      atomicAdd(reinterpret_cast<unsigned long long*>(integers) + entry,
                static_cast<unsigned long long>(__float2ll_rn(gradient * factor)));
    } else if (!(fabsf(gradient) < INFINITY)) {  // the sum of these alone is the same in any order
      atomicAdd(reinterpret_cast<float*>(integers + entry), gradient);
    }
  }
};

// Sums what a thread's consecutive elements add to the same entry; at the end, what all lanes of a warp do.
template <class T>
struct EntrySum {
  Index<T> entry = 0;
  T sum = T(0);

  template <class Entries>
  __device__ __forceinline__ void add(const Entries& entries, Index<T> to, T gradient) {
    if (to != entry) entries.add(entry, sum), entry = to, sum = T(0);
    sum += gradient;
  }
  // Called by all lanes of a warp.
  template <class Entries>
  __device__ __forceinline__ void finish(const Entries& entries) const {
    const Index<T> most = reduce_lanes<32>(entry, [](auto a, auto b) { return a > b ? a : b; });
    if (__any_sync(~0u, entry != most)) return entries.add(entry, sum);
    const T of_warp = reduce_lanes<32>(sum, AddNumbers{});
    if (threadIdx.x % 32 == 0) entries.add(entry, of_warp);
  }
};

}  // namespace monoidreduce
