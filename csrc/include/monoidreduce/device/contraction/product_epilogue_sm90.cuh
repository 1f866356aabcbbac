// Epilogues of the contraction (contraction_sm90.cuh) that store, scatter or add plain matrix products:
// products of dlogits, and stored scores.
#pragma once

#include "monoidreduce/device/contraction/row_order.cuh"
#include "monoidreduce/device/contraction/slab_stores_sm90.cuh"

namespace monoidreduce::sm90 {

// One factor for each row, in the order of the rows: [rows]. Null: 1.
struct RowFactors {
  const float* factors;
  RowOrder order;

  struct OfThread {
    float factor[2];
  };
  __device__ __forceinline__ OfThread of(int row0) const {
    OfThread own{1.f, 1.f};
    if (factors == nullptr) return own;
#pragma unroll
    for (int r = 0; r < 2; ++r) own.factor[r] = factors[::min(row0 + fragment_row(r), order.rows - 1)];
    return own;
  }
};

// The same factor for all rows: *factor, or 1 if it is null. order: the order of the width, over which the
// product sums. If no place of it is active, the factor is 0, so the product is 0 whatever memory holds.
struct OneFactor {
  const float* factor;
  RowOrder order;

  __device__ __forceinline__ RowFactors::OfThread of(int) const {
    const float all = order.counted() == 0 ? 0.f : factor == nullptr ? 1.f : *factor;
    return {all, all};
  }
};

// Elements [first, first + kSize) of the thread's dot products, times their row's factor. A factor of 0 gives
// 0 even where the product is NaN.
template <int kSize, int kAll>
__device__ __forceinline__ void scaled_part(float (&part)[kSize], const float (&dots)[1][kAll], int first,
                                            const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float by = factor[row_of_element(i)];
    part[i] = by == 0.f ? 0.f : dots[0][first + i] * by;
  }
}

// Stores the product times a factor, rounded, to a tensor [1, 1, rows, columns] of the element type.
template <class E>
struct StoreEpilogue {
  using Memory = SlabMemory;
  using Work = RowFactors::OfThread;
  OneFactor factor;
  SlabStores<1> stores;

  __device__ __forceinline__ Work begin(int row0) const { return factor.of(row0); }
  template <int kSize>
  __device__ __forceinline__ void tile(const Work& work, const float (&dots)[1][kSize], int row0, int column0,
                                       Memory& memory, int warpgroup) const {
    constexpr int kSlabs = kSize / kSlabElements;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      float part[kSlabElements];
      scaled_part(part, dots, slab * kSlabElements, work.factor);
      std::uint32_t words[kSlabElements / 2];
      round_fragment<E>(words, part);
      stores.template store<kSlabs>(words, 0, row0, column0 + slab * kSlab, slab, memory, warpgroup);
    }
  }
  __device__ __forceinline__ void end(const Work&, std::int64_t) const {}
  __device__ __forceinline__ void finish() const { stores.finish(); }
};

// Multiplies rows by their factors, and scatters the active ones: row i is stored as row order[i] of a tensor
// [1, 1, rows, columns].
template <class Out>
struct ScatterEpilogue {
  using Memory = SlabMemory;
  using Work = RowFactors::OfThread;
  RowFactors factors;
  arch::TensorMap out;  // boxes of one line

  __device__ __forceinline__ Work begin(int row0) const { return factors.of(row0); }
  template <int kSize>
  __device__ __forceinline__ void tile(const Work& work, const float (&dots)[1][kSize], int row0, int column0,
                                       Memory& memory, int warpgroup) const {
    constexpr int kSlabs = kSize / kElementsOfSlab<Out>;
    const RowOrder& order = factors.order;
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32 % 4 * kSlabBoxRows + lane;
    const bool stores = lane < kSlabBoxRows && row0 + line < order.counted();
    const int row = stores ? static_cast<int>(order[row0 + line]) : 0;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      unsigned char* const staging = memory.slabs[warpgroup][slab % 2];
      float part[kElementsOfSlab<Out>];
      scaled_part(part, dots, slab * kElementsOfSlab<Out>, work.factor);
      if (slab > 0 || kSlabs % 2 == 0) {
        arch::wait_stores_read<1>();
      } else {
        arch::wait_stores_read<0>();  // the last store of the previous tile used the same slab
      }
      __syncwarp();
      stage<Out>(part, staging);
      arch::fence_async_shared();
      __syncwarp();
      if (stores)
        arch::store_streaming(out, {column0 + slab * kSlabOf<Out>, row, 0, 0}, staging + line * kLineBytes);
      arch::commit_stores();
    }
  }
  __device__ __forceinline__ void end(const Work&, std::int64_t) const {}
  __device__ __forceinline__ void finish() const { arch::wait_stores_read<0>(); }
};

// Multiplies rows by their factors and adds them to a tensor of floats [1, 1, rows, columns], 32 columns at a
// time, by TMA reduce-add. Each element is added to once, so the order does not matter. Factors: RowFactors or
// OneFactor.
template <class Factors>
struct AddEpilogue {
  using Memory = SlabMemory;
  using Work = RowFactors::OfThread;
  Factors factors;
  arch::TensorMap sums;  // boxes of kSlabBoxRows lines

  __device__ __forceinline__ Work begin(int row0) const { return factors.of(row0); }
  template <int kSize>
  __device__ __forceinline__ void tile(const Work& work, const float (&dots)[1][kSize], int row0, int column0,
                                       Memory& memory, int warpgroup) const {
    constexpr int kSlabs = kSize / kElementsOfSlab<float>;
    static_assert(kSlabs % 2 == 0);
    const int line = threadIdx.x / 32 % 4 * kSlabBoxRows;
    const bool leads = threadIdx.x % 32 == 0;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      unsigned char* const staging = memory.slabs[warpgroup][slab % 2];
      float part[kElementsOfSlab<float>];
      scaled_part(part, dots, slab * kElementsOfSlab<float>, work.factor);
      if (leads) arch::wait_stores_read<1>();
      __syncwarp();
      stage<float>(part, staging);
      arch::fence_async_shared();
      __syncwarp();
      if (leads) {
        arch::reduce_add(sums, {column0 + slab * kSlabOf<float>, row0 + line, 0, 0},
                         staging + line * kLineBytes);
        arch::commit_stores();
      }
    }
  }
  __device__ __forceinline__ void end(const Work&, std::int64_t) const {}
  __device__ __forceinline__ void finish() const { arch::wait_stores_read<0>(); }
};

// Stores the product to a tensor of floats [1, 1, rows, columns].
struct FloatEpilogue {
  using Memory = SlabMemory;
  struct Work {};
  SlabStores<1> stores;

  __device__ __forceinline__ Work begin(int) const { return {}; }
  template <int kSize>
  __device__ __forceinline__ void tile(const Work&, const float (&dots)[1][kSize], int row0, int column0,
                                       Memory& memory, int warpgroup) const {
#pragma unroll
    for (int slab = 0; slab < kSize / kSlabElements; ++slab) {
      float part[kSlabElements];
#pragma unroll
      for (int i = 0; i < kSlabElements; ++i) part[i] = dots[0][slab * kSlabElements + i];
      stores.store_floats(part, 0, row0, column0 + slab * kSlab, memory, warpgroup);
    }
  }
  __device__ __forceinline__ void end(const Work&, std::int64_t) const {}
  __device__ __forceinline__ void finish() const { stores.finish(); }
};

}  // namespace monoidreduce::sm90
