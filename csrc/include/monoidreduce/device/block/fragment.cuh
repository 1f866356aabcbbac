// A fragment is what a thread holds of a warpgroup's 64 x kColumns accumulator. Element i lies in row
// fragment_row(row_of_element(i)) and column fragment_column(i). Four neighbouring lanes share two rows,
// eight apart.
#pragma once

#include <cstdint>
#include <type_traits>

#include "monoidreduce/device/arch/approximate.cuh"
#include "monoidreduce/device/arch/mma.cuh"
#include "monoidreduce/device/arch/register.cuh"
#include "monoidreduce/device/arch/shared_memory.cuh"
#include "monoidreduce/device/block/shared_tile.cuh"

namespace monoidreduce {

inline constexpr int kFragmentRows = 64, kThreadRowsOfFragment = 2;
inline constexpr int kSlabElements = kFragmentRows * kSlab / 128;  // that a thread holds of 64 columns

__device__ __forceinline__ int fragment_row(int row_of_thread) {
  return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * row_of_thread;
}
// Which of the thread's two rows element i is in.
__device__ __forceinline__ constexpr int row_of_element(int i) { return i / 2 % 2; }
__device__ __forceinline__ int fragment_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
// How many columns there are between element 0 and element i, a multiple of 4.
__device__ __forceinline__ constexpr int fragment_columns(int i) { return 2 * i; }

// to[i] = fragment[step * kStep + first + i], for a loop over steps that is not unrolled. Registers have no index, so branches find
// the step among [kBegin, kEnd). first: known to the compiler.
template <int kStep, int kBegin, int kEnd, int kCount, int kSize>
__device__ __forceinline__ void take_elements(float (&to)[kCount], const float (&fragment)[kSize], int step,
                                              int first) {
  static_assert(kEnd * kStep <= kSize);
  if constexpr (kEnd - kBegin == 1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = arch::copied(fragment[kBegin * kStep + first + i]);
  } else {
    constexpr int kMiddle = (kBegin + kEnd) / 2;
    if (step < kMiddle)
      take_elements<kStep, kBegin, kMiddle>(to, fragment, step, first);
    else
      take_elements<kStep, kMiddle, kEnd>(to, fragment, step, first);
  }
}

// Rounds a fragment to the left operand of products over its columns: pairs of 16-bit elements, or floats
// rounded to tf32.
template <class E, int kWords, int kSize>
__device__ __forceinline__ void round_fragment(std::uint32_t (&operand)[kWords],
                                               const float (&fragment)[kSize]) {
  static_assert(kWords * 4 == kSize * sizeof(E));
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (std::is_same_v<E, float>)
      operand[i] = arch::round_to_tf32(fragment[i]);
    else
      operand[i] = arch::pack<E>(fragment[2 * i], fragment[2 * i + 1]);
  }
}

// Writes two adjacent elements to global memory.
template <class E>
__device__ __forceinline__ void store_pair(E* to, float first, float second) {
  if constexpr (std::is_same_v<E, float>)
    *reinterpret_cast<float2*>(to) = {first, second};
  else
    *reinterpret_cast<std::uint32_t*>(to) = arch::pack<E>(first, second);
}

// Writes a rounded fragment, kSize words, to rows [row0, row0 + 64) of a tile of kRows lines.
template <int kRows, int kSize>
__device__ __forceinline__ void store_fragment(arch::SharedAddress tile, int row0,
                                               const std::uint32_t (&fragment)[kSize]) {
  const int lane = threadIdx.x % 32, line = row0 + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) {
    arch::store_matrix_x4(tile + i / 4 * kRows * kLineBytes + place_of(line, i % 4 * 2 + lane / 16),
                          {fragment[4 * i], fragment[4 * i + 1], fragment[4 * i + 2], fragment[4 * i + 3]});
  }
}

// Writes a rounded fragment transposed: the lines of the slab are the fragment's columns.
template <int kSize>
__device__ __forceinline__ void store_fragment_transposed(arch::SharedAddress slab,
                                                          const std::uint32_t (&fragment)[kSize]) {
  const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) {
    const int line = i * 16 + lane / 16 * 8 + lane % 8;
    arch::store_matrix_x4_transposed(
        slab + place_of(line, chunk),
        {fragment[4 * i], fragment[4 * i + 1], fragment[4 * i + 2], fragment[4 * i + 3]});
  }
}

// Sums a slab of a fragment, 64 columns, over the warp's 16 rows. The calling lane gets the sums of the two
// adjacent columns first and first + 1. Each exchange halves the number of columns that a lane still has.
struct ColumnSums {
  int first;
  float2 sums;

  __device__ __forceinline__ explicit ColumnSums(const float (&slab)[32]) {
    float left[16];
#pragma unroll
    for (int c = 0; c < 16; ++c) left[c] = slab[c / 2 * 4 + c % 2] + slab[c / 2 * 4 + c % 2 + 2];
    const auto halve = [&](auto half) {
      constexpr int kHalf = decltype(half)::value;
      const bool upper = threadIdx.x % 32 & 2 * kHalf;
#pragma unroll
      for (int c = 0; c < kHalf; ++c) {
        const float given = upper ? left[c] : left[c + kHalf], kept = upper ? left[c + kHalf] : left[c];
        left[c] = kept + __shfl_xor_sync(0xffffffffu, given, 2 * kHalf);
      }
    };
    halve(std::integral_constant<int, 8>{});
    halve(std::integral_constant<int, 4>{});
    halve(std::integral_constant<int, 2>{});
    // Two of the 16 columns are left; the lane's upper bits say which.
    first = threadIdx.x % 32 / 4 * 8 + threadIdx.x % 4 * 2;
    sums = {left[0], left[1]};
  }
};

// Column sums of a matrix that is never stored itself, one for each 16 rows: [rows / 16, pitch]. They are
// stored for whole tiles of 256 rows and 64 columns.
struct PartialSums {
  float* data;  // null: no sums are wanted
  std::int64_t pitch;
  int rows;  // rows from here on add nothing

  // Stores the sums of 64 columns from column0 on, over the 64 rows from row0 on. slab: the thread's elements
  // of them.
  __device__ __forceinline__ void store(const float (&slab)[32], int row0, int column0) const {
    if (data == nullptr || column0 >= pitch) return;
    float there[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) there[i] = row0 + fragment_row(row_of_element(i)) < rows ? slab[i] : 0.f;
    const ColumnSums of_warp(there);
    const std::int64_t group = row0 / 16 + threadIdx.x / 32 % 4;
    *reinterpret_cast<float2*>(data + group * pitch + column0 + of_warp.first) = of_warp.sums;
  }
};

}  // namespace monoidreduce
