// A warp's matrix products (arch/mma.cuh), and their operands in tiles in shared memory (shared_tile.cuh), 16 lines by 16
// elements at a time.
#pragma once

#include "monoidreduce/arch/mma.cuh"
#include "monoidreduce/arch/shared_memory.cuh"
#include "monoidreduce/block/shared_tile.cuh"

namespace monoidreduce {

// Four 8 x 8 matrices are what a thread's four words come from. Which of them comes second, the one 8 lines on or the
// one 8 elements on, is what layouts differ in.
template <int kLines, bool kLinesFirst, bool kTransposed>
struct WarpOperand {
  arch::SharedAddress lane;  // where the lane's line of the tile's first block starts

  __device__ __forceinline__ explicit WarpOperand(arch::SharedAddress tile) {
    const int l = threadIdx.x % 32, line = kLinesFirst ? l % 16 : l / 16 * 8 + l % 8,
              chunk = kLinesFirst ? l / 16 : l / 8 % 2;
    // place_of(line, chunk), with l for line: they are the same modulo 8, and fewer registers spill.
    lane = tile + line * kLineBytes + (chunk ^ (l % 8)) * 16;
  }
  // The operand that starts at a line, a multiple of 8, and at an element, a multiple of 16; blocks that are loaded from it
  // must not reach beyond the power of two that the element is a multiple of, or are whole slabs on.
  __device__ __forceinline__ WarpOperand from(int line, int element) const {
    WarpOperand shifted = *this;
    shifted.lane = (lane ^ (element % kSlab * 2)) + element / kSlab * kLines * kLineBytes + line * kLineBytes;
    return shifted;
  }
  // The block at a line and an element that are multiples of 16.
  __device__ __forceinline__ void load(std::uint32_t (&words)[4], int line, int element) const {
    arch::load_matrix_x4<kTransposed>(words, from(line, element).lane);
  }
};

// Left operand, rows x depth: the four words of a product. Its rows are the lines of the tile, or its depth is.
template <int kLines>
using RowsOfLines = WarpOperand<kLines, true, false>;
template <int kLines>
using RowsOfElements = WarpOperand<kLines, false, true>;
// Right operand, depth x columns: the words of two products, of 8 columns each. Its columns are the lines, or its depth.
template <int kLines>
using ColumnsOfLines = WarpOperand<kLines, false, false>;
template <int kLines>
using ColumnsOfElements = WarpOperand<kLines, true, true>;

// sum[f] += left . right, over kDepth: left(words, f, k) reads 16 rows of fragment f from depth k on, right(words, k, n) 16
// columns from n on. A thread has kSize = columns / 2 of each sum.
template <class E, int kDepth, int kFragments, int kSize, class Left, class Right>
__device__ __forceinline__ void multiply(float (&sum)[kFragments][kSize], const Left& left,
                                         const Right& right) {
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    std::uint32_t a[kFragments][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) left(a[f], f, k);
#pragma unroll
    for (int n = 0; n < 2 * kSize; n += 16) {
      std::uint32_t b[4];
      right(b, k, n);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        arch::mma<E>(&sum[f][n / 2], a[f], b);
        arch::mma<E>(&sum[f][n / 2 + 4], a[f], b + 2);
      }
    }
  }
}

template <int kFragments, int kSize>
__device__ __forceinline__ void clear(float (&sum)[kFragments][kSize]) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f)
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[f][i] = 0.f;
}

// 16 depth of a left operand out of a rounded fragment (fragment.cuh).
template <int kSize>
__device__ __forceinline__ void operand_of_fragment(std::uint32_t (&words)[4],
                                                    const std::uint32_t (&fragment)[kSize], int k) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = fragment[k / 4 + i];
}

// Writes a warp's part of a rounded fragment: 16 lines from line on, elements from element on, both multiples of 16.
// kTransposed: the fragment's columns become lines, 16 elements of each.
template <int kLines, bool kTransposed, int kSize>
__device__ __forceinline__ void store_words(arch::SharedAddress tile, int line, int element,
                                            const std::uint32_t (&fragment)[kSize]) {
  const int l = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const int along = i / 2 * 8, down = i % 2 * 8;
    const int to_line = line + (kTransposed ? along : down) + l / 4,
              to_element = element + (kTransposed ? down : along);
    arch::store(tile + to_element / kSlab * kLines * kLineBytes + to_line * kLineBytes +
                    ((to_element % kSlab / 8) ^ (to_line % 8)) * 16 + l % 4 * 4,
                kTransposed ? arch::transpose_matrix(fragment[i]) : fragment[i]);
  }
}

}  // namespace monoidreduce
