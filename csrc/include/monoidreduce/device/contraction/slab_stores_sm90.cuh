// Stores rounded fragments from registers to a tensor, 64 columns at a time, through shared memory and TMA.
#pragma once

#include "monoidreduce/device/arch/tma.cuh"
#include "monoidreduce/device/arch/warpgroup.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"

namespace monoidreduce::sm90 {

inline constexpr int kSlabBoxRows = kFragmentRows / 4;  // rows that a warp stores: one box of the tensor map

struct alignas(kSharedAlignment) SlabMemory {
  // Two buffers per warpgroup: its warps fill one while TMA still reads the other.
  unsigned char slabs[2][2][kFragmentRows * kLineBytes];
};

// Elements that a thread has of a slab whose lines have kSlabOf<Out> columns.
template <class Out>
inline constexpr int kElementsOfSlab = kFragmentRows * kSlabOf<Out> / kWarpgroup;

// Writes the warp's lines of a slab, rounded to Out, to shared memory as TMA reads it.
template <class Out>
__device__ __forceinline__ void stage(const float (&part)[kElementsOfSlab<Out>], unsigned char* slab) {
  if constexpr (sizeof(Out) == 4) {
#pragma unroll
    for (int i = 0; i < kElementsOfSlab<Out>; i += 2) {
      const int column = fragment_column(i);
      unsigned char* const to = slab + place_of(fragment_row(row_of_element(i)), column / 4);
      *reinterpret_cast<float2*>(to + column % 4 * sizeof(float)) = {part[i], part[i + 1]};
    }
  } else {
    std::uint32_t words[kElementsOfSlab<Out> / 2];
    round_fragment<Out>(words, part);
    store_fragment<kFragmentRows>(arch::shared_address(slab), 0, words);
  }
}

// Stores to kOuts tensors [1, 1, rows, columns].
template <int kOuts_>
struct SlabStores {
  static constexpr int kOuts = kOuts_;
  using Memory = SlabMemory;
  arch::TensorMap outs[kOuts];

  // Stores the warp's lines of a slab at (row0, column) to the n-th tensor. store: the index of this store
  // among the kStores of a tile.
  template <int kStores>
  __device__ __forceinline__ void store(const std::uint32_t (&words)[kSlabElements / 2], int n, int row0,
                                        int column, int store, Memory& memory, int warpgroup) const {
    const int line = threadIdx.x / 32 % 4 * kSlabBoxRows;
    unsigned char* const staging = memory.slabs[warpgroup][store % 2];
    const bool leads = threadIdx.x % 32 == 0;
    if (leads) {
      // With an odd number of stores per tile, the last of one tile and the first of the next use the same buffer.
      if (store == 0 && kStores % 2 != 0) {
        arch::wait_stores_read<0>();
      } else {
        arch::wait_stores_read<1>();
      }
    }
    __syncwarp();
    store_fragment<kFragmentRows>(arch::shared_address(staging), 0, words);
    arch::fence_async_shared();
    __syncwarp();
    if (leads) {
      arch::store_streaming(outs[n], {column, row0 + line, 0, 0}, staging + line * kLineBytes);
      arch::commit_stores();
    }
  }
  // The same for a slab of floats, which has 32 columns. Of a tile there is an even number of these stores.
  __device__ __forceinline__ void store_floats(const float (&columns)[kElementsOfSlab<float>], int n,
                                               int row0, int column, int store, Memory& memory,
                                               int warpgroup) const {
    const int line = threadIdx.x / 32 % 4 * kSlabBoxRows;
    unsigned char* const staging = memory.slabs[warpgroup][store % 2];
    const bool leads = threadIdx.x % 32 == 0;
    if (leads) arch::wait_stores_read<1>();
    __syncwarp();
    stage<float>(columns, staging);
    arch::fence_async_shared();
    __syncwarp();
    if (leads) {
      arch::store_streaming(outs[n], {column, row0 + line, 0, 0}, staging + line * kLineBytes);
      arch::commit_stores();
    }
  }
  // The same for 64 columns of floats, in two slabs.
  __device__ __forceinline__ void store_floats(const float (&columns)[kSlabElements], int n, int row0,
                                               int column, Memory& memory, int warpgroup) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[kElementsOfSlab<float>];
#pragma unroll
      for (int i = 0; i < kElementsOfSlab<float>; ++i) part[i] = columns[half * kElementsOfSlab<float> + i];
      store_floats(part, n, row0, column + half * kSlabOf<float>, half, memory, warpgroup);
    }
  }
  __device__ __forceinline__ void finish() const { arch::wait_stores_read<0>(); }
};

}  // namespace monoidreduce::sm90
