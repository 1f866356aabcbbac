// Matrix products of a warp (device/arch/mma.cuh), and their operands from tiles in shared memory
// (shared_tile.cuh). One load reads 16 lines by 32 bytes of an operand, or 8 lines by 16 floats.
//
// A product of floats is 8 deep: lane l holds elements l % 4 and l % 4 + 4 of the depth. In an accumulator,
// lane l holds columns 2 (l % 4) and 2 (l % 4) + 1. So where an accumulator becomes an operand, each 8
// elements of the depth are permuted to the "paired" order:
//
//   0 2 4 6 1 3 5 7
//
// The other operand must have its depth in the same order. A float tile whose lines are the depth is read in
// the paired order, and store_operand stores elements in it. Lines that were spread when they were copied
// (kSpread of copy_tile.cuh) come out in their natural order when they are read in the paired one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "monoidreduce/device/arch/mma.cuh"
#include "monoidreduce/device/arch/shared_memory.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/shared_tile.cuh"

namespace monoidreduce {

template <class E>
inline constexpr int kMmaDepth = 32 / static_cast<int>(sizeof(E));

// An operand of 16-bit elements, or of floats read as 4-byte units: a thread's four words are one from each
// of four 8 x 8 matrices (8 x 4 of floats). Layouts differ in which matrix is second: the one 8 lines on
// (kLinesFirst), or the one a chunk on.
template <int kLines, bool kLinesFirst, bool kTransposed, class E>
struct WarpOperand {
  arch::SharedAddress lane;  // the shared address of the calling lane's line, in the first block of the tile

  __device__ __forceinline__ explicit WarpOperand(arch::SharedAddress tile) {
    const int l = threadIdx.x % 32, line = kLinesFirst ? l % 16 : l / 16 * 8 + l % 8,
              chunk = kLinesFirst ? l / 16 : l / 8 % 2;
    // This is place_of(line, chunk) with l in place of line: they are equal modulo 8, and fewer registers
    // spill.
    lane = tile + line * kLineBytes + (chunk ^ (l % 8)) * 16;
  }
  // The operand that starts at a line, a multiple of 8, and an element, a multiple of 32 bytes. Offsets are
  // combined by XOR: offsets of blocks that are loaded from it must be below the largest power of two that
  // divides `element`. Blocks whole slabs further on may be loaded too.
  __device__ __forceinline__ WarpOperand from(int line, int element) const {
    constexpr int kItem = sizeof(E);
    WarpOperand shifted = *this;
    shifted.lane = (lane ^ (element % kSlabOf<E> * kItem)) + element / kSlabOf<E> * kLines * kLineBytes +
                   line * kLineBytes;
    return shifted;
  }
  // Loads the block at a line that is a multiple of 16 and an element that is a multiple of 32 bytes.
  __device__ __forceinline__ void load(std::uint32_t (&words)[4], int line, int element) const {
    arch::load_matrix_x4<kTransposed>(words, from(line, element).lane);
  }
};

// A transposed operand of floats: 8 lines in the paired order by 16 elements, loaded word by word (ldmatrix
// transposes only 16-bit elements). That takes no longer: the words of a warp are in different banks.
// kLinesFirst: the second word is the one a line on, not the one 8 elements on. kPaired: the elements are
// stored in the paired order.
template <int kLines, bool kLinesFirst, bool kPaired>
struct TransposedFloats {
  arch::SharedAddress lane;

  __device__ __forceinline__ explicit TransposedFloats(arch::SharedAddress tile) {
    const int line = threadIdx.x % 4 * 2, element = threadIdx.x % 32 / 4;
    const int place = kPaired ? element % 2 * 4 + element / 2 : element;
    lane = tile + place_of(line, place / 4) + place % 4 * 4;
  }
  // As WarpOperand::from; here the element is a multiple of 16.
  __device__ __forceinline__ TransposedFloats from(int line, int element) const {
    TransposedFloats shifted = *this;
    shifted.lane = (lane ^ (element % kSlabOf<float> * 4)) + element / kSlabOf<float> * kLines * kLineBytes +
                   line * kLineBytes;
    return shifted;
  }
  // Loads the block at a line that is a multiple of 8 and an element that is a multiple of 16.
  __device__ __forceinline__ void load(std::uint32_t (&words)[4], int line, int element) const {
    const arch::SharedAddress at = from(line, element).lane, next_line = (at ^ 16) + kLineBytes;
    words[0] = arch::load<std::uint32_t>(at);
    words[kLinesFirst ? 1 : 2] = arch::load<std::uint32_t>(next_line);
    words[kLinesFirst ? 2 : 1] = arch::load<std::uint32_t>(at ^ 32);
    words[3] = arch::load<std::uint32_t>(next_line ^ 32);
  }
};

// An operand of floats whose elements are the depth, in the paired order, and whose lines are the columns.
// The lines are spread (copy_tile.cuh), so that the pairs of words of half a warp are in different banks.
template <int kLines>
struct PairsOfSpreadLines {
  arch::SharedAddress lane;

  __device__ __forceinline__ explicit PairsOfSpreadLines(arch::SharedAddress tile) {
    const int line = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    lane = tile + place_of(line % 4 * 2 + line / 4, pair / 2) + pair % 2 * 8;
  }
  // Loads the block at a line that is a multiple of 16 and an element that is a multiple of 8.
  __device__ __forceinline__ void load(std::uint32_t (&words)[4], int line, int element) const {
    const arch::SharedAddress at = (lane ^ (element % kSlabOf<float> * 4)) +
                                   element / kSlabOf<float> * kLines * kLineBytes + line * kLineBytes;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 pair = arch::load<float2>(at + n * 8 * kLineBytes);
      words[2 * n] = __float_as_uint(pair.x), words[2 * n + 1] = __float_as_uint(pair.y);
    }
  }
};

// Left operand, rows x depth: four words for one product. Its rows are the lines of the tile (RowsOfLines) or
// the elements of a line, with the lines as depth (RowsOfElements).
template <int kLines, class E = std::uint16_t>
using RowsOfLines = WarpOperand<kLines, true, false, E>;
template <int kLines, class E = std::uint16_t, bool kPaired = false>
using RowsOfElements = std::conditional_t<std::is_same_v<E, float>, TransposedFloats<kLines, false, kPaired>,
                                          WarpOperand<kLines, false, true, E>>;
// Right operand, depth x columns: the words of two products of 8 columns each. Its columns are the lines
// (ColumnsOfLines) or the elements of a line, with the lines as depth (ColumnsOfElements).
template <int kLines, class E = std::uint16_t>
using ColumnsOfLines = WarpOperand<kLines, false, false, E>;
template <int kLines, class E = std::uint16_t>
using ColumnsOfElements = std::conditional_t<std::is_same_v<E, float>, TransposedFloats<kLines, true, false>,
                                             WarpOperand<kLines, true, true, E>>;

// ColumnsOfLines for products whose left operand is a fragment (an accumulator, with its depth in the paired
// order).
template <int kLines, class E>
using ColumnsOfFragmentLines =
    std::conditional_t<std::is_same_v<E, float>, PairsOfSpreadLines<kLines>, ColumnsOfLines<kLines, E>>;

// sum[f] += left . right, over a depth of kDepth. left(words, f, k) reads 16 rows of fragment f from depth k
// on; right(words, k, n) reads 16 columns from n on. A thread has kSize = columns / 2 elements of each sum.
// Floats of the left operand must be rounded to tf32 before, because they are read more than once; those of
// the right one are rounded here.
template <class E, int kDepth, int kFragments, int kSize, class Left, class Right>
__device__ __forceinline__ void multiply(float (&sum)[kFragments][kSize], const Left& left,
                                         const Right& right) {
#pragma unroll
  for (int k = 0; k < kDepth; k += kMmaDepth<E>) {
    std::uint32_t a[kFragments][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) left(a[f], f, k);
#pragma unroll
    for (int n = 0; n < 2 * kSize; n += 16) {
      std::uint32_t b[4];
      right(b, k, n);
      if constexpr (std::is_same_v<E, float>) {
#pragma unroll
        for (std::uint32_t& word : b) word = arch::round_to_tf32(__uint_as_float(word));
      }
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

// How many words kSize elements of a fragment take, rounded to E.
template <class E, int kSize>
inline constexpr int kWordsOf = kSize * static_cast<int>(sizeof(E)) / 4;

// The part of a left operand from depth k on, out of a fragment that was rounded to E (round_fragment). The
// depth of floats is in the paired order.
template <class E, int kSize>
__device__ __forceinline__ void operand_of_fragment(std::uint32_t (&words)[4],
                                                    const std::uint32_t (&fragment)[kSize], int k) {
  constexpr int kOrder[4] = {0, sizeof(E) == 4 ? 2 : 1, sizeof(E) == 4 ? 1 : 2, 3};
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = fragment[k / kMmaDepth<E> * 4 + kOrder[i]];
}

// Writes a warp's part of a fragment as 16-bit elements: 16 lines from `line` on, elements from `element` on,
// both multiples of 16. kTransposed: the fragment's columns become lines of 16 elements each.
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

// The same for floats. kPaired: each 8 elements are stored in the paired order.
template <int kLines, bool kTransposed, bool kPaired, int kSize>
__device__ __forceinline__ void store_floats(arch::SharedAddress tile, int line, int element,
                                             const std::uint32_t (&fragment)[kSize]) {
  const int l = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const int row = i / 2 % 2 * 8 + l / 4,
              column = i / 4 * 8 + (kPaired ? l % 4 + i % 2 * 4 : l % 4 * 2 + i % 2);
    const int to_line = line + (kTransposed ? column : row),
              to_element = element + (kTransposed ? row : column);
    arch::store(tile + to_element / kSlabOf<float> * kLines * kLineBytes +
                    place_of(to_line, to_element % kSlabOf<float> / 4) + to_element % 4 * 4,
                fragment[i]);
  }
}

// Writes a warp's part of a rounded fragment to where RowsOfLines and RowsOfElements read it.
template <class E, int kLines, int kSize>
__device__ __forceinline__ void store_operand(arch::SharedAddress tile, int line, int element,
                                              const std::uint32_t (&fragment)[kSize]) {
  if constexpr (std::is_same_v<E, float>) {
    store_floats<kLines, false, true>(tile, line, element, fragment);
  } else {
    store_words<kLines, false>(tile, line, element, fragment);
  }
}

// Writes a warp's part of a fragment of results, as E, to where store_tile (copy_tile.cuh) reads it.
template <class E, int kLines, bool kTransposed, int kSize>
__device__ __forceinline__ void store_result(arch::SharedAddress tile, int line, int element,
                                             const float (&fragment)[kSize]) {
  std::uint32_t words[kWordsOf<E, kSize>];
  if constexpr (std::is_same_v<E, float>) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) words[i] = __float_as_uint(fragment[i]);
    store_floats<kLines, kTransposed, false>(tile, line, element, words);
  } else {
    round_fragment<E>(words, fragment);
    store_words<kLines, kTransposed>(tile, line, element, words);
  }
}

}  // namespace monoidreduce
