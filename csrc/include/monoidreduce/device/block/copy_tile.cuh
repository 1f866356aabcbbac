// Copies tiles between global and shared memory with all threads of a block (cp.async and ordinary stores, no
// TMA).
#pragma once

#include <cstdint>
#include <type_traits>

#include "monoidreduce/device/arch/async_copy.cuh"
#include "monoidreduce/device/arch/mma.cuh"
#include "monoidreduce/device/arch/reduce_add.cuh"
#include "monoidreduce/device/block/shared_tile.cuh"

namespace monoidreduce {

// A row-major matrix. Lines are contiguous and start on 16-byte boundaries; width, in elements, is a multiple
// of 8. The functions below name its element type E only for its size.
struct Lines {
  char* data;
  std::int64_t stride;  // bytes
  int count, width;
};

// A chunk is 16 bytes: 8 elements of 16 bits.
inline constexpr int kChunkElements = 8, kChunksOfLine = kSlab / kChunkElements;

// The line of a tile at which a line of the matrix is stored. kSpread: see load_tile.
template <bool kSpread>
__device__ __forceinline__ int tile_line(int line) {
  return kSpread ? line / 8 * 8 + line % 4 * 2 + line / 4 % 2 : line;
}

// Starts copying kLines x kWidth elements, from (line0, element0) on, into a tile; elements beyond the matrix
// are zeros. kSpread: each 8 lines are stored in the order 0 4 1 5 2 6 3 7 (warp_operand.cuh says why).
template <int kThreads, int kLines, int kWidth, class E = std::uint16_t, bool kSpread = false>
__device__ __forceinline__ void load_tile(arch::SharedAddress tile, const Lines& from, int line0,
                                          int element0) {
  constexpr int kStep = kThreads / kChunksOfLine;  // lines that the block copies at a time
  constexpr int kItem = sizeof(E);
  static_assert(kLines % kStep == 0 && kStep % 8 == 0);
  // Kernels of width 128 have the fewest registers to spare: they read the thread index again for each tile,
  // so that nothing computed from it is kept in registers between tiles.
  const int thread = kWidth == 128 ? arch::thread_again() : static_cast<int>(threadIdx.x);
  const int line = thread / kChunksOfLine, chunk = thread % kChunksOfLine;
  const int element = element0 + chunk * (kSlabOf<E> / kChunksOfLine);
  const char* source = from.data + (line0 + line) * from.stride + element * kItem;
  const arch::SharedAddress to = tile + place_of(tile_line<kSpread>(line), chunk);
#pragma unroll
  for (int n = 0; n < kLines / kStep; ++n) {
#pragma unroll
    for (int slab = 0; slab < kWidth / kSlabOf<E>; ++slab) {
      arch::copy_async(to + (slab * kLines + n * kStep) * kLineBytes, source + slab * kLineBytes,
                       line0 + line + n * kStep < from.count && element + slab * kSlabOf<E> < from.width);
    }
    source += kStep * from.stride;
  }
}

// Rounds a tile of floats to tf32. Each thread rounds the chunks that it copied itself (load_tile), once they
// have arrived.
template <int kThreads, int kLines, int kWidth, bool kSpread = false>
__device__ __forceinline__ void round_tile(unsigned char* tile) {
  constexpr int kStep = kThreads / kChunksOfLine;
  unsigned char* const own =
      tile + place_of(tile_line<kSpread>(threadIdx.x / kChunksOfLine), threadIdx.x % kChunksOfLine);
#pragma unroll
  for (int n = 0; n < kLines / kStep * (kWidth / kSlabOf<float>); ++n) {
    auto& chunk = *reinterpret_cast<uint4*>(own + n * kStep * kLineBytes);
    chunk = {arch::round_to_tf32(__uint_as_float(chunk.x)), arch::round_to_tf32(__uint_as_float(chunk.y)),
             arch::round_to_tf32(__uint_as_float(chunk.z)), arch::round_to_tf32(__uint_as_float(chunk.w))};
  }
}

// Writes a tile to (line0, element0) on, up to the ends of the matrix. adds: floats are added to what is
// there.
template <int kThreads, int kLines, int kWidth, class E = std::uint16_t>
__device__ __forceinline__ void store_tile(const Lines& to, int line0, int element0,
                                           const unsigned char* tile, bool adds = false) {
  constexpr int kStep = kThreads / kChunksOfLine;
  constexpr int kItem = sizeof(E);
  static_assert(kLines % kStep == 0 && kStep % 8 == 0);
  const int line = threadIdx.x / kChunksOfLine, chunk = threadIdx.x % kChunksOfLine;
  const int element = element0 + chunk * (kSlabOf<E> / kChunksOfLine);
  const unsigned char* const source = tile + place_of(line, chunk);
#pragma unroll
  for (int n = 0; n < kLines / kStep; ++n) {
#pragma unroll
    for (int slab = 0; slab < kWidth / kSlabOf<E>; ++slab) {
      if (line0 + line + n * kStep >= to.count || element + slab * kSlabOf<E> >= to.width) continue;
      char* const at = to.data + (line0 + line + n * kStep) * to.stride + (element + slab * kSlabOf<E>)*kItem;
      const auto chunk = *reinterpret_cast<const uint4*>(source + (slab * kLines + n * kStep) * kLineBytes);
      if constexpr (std::is_same_v<E, float>) {
        if (adds) {
          arch::reduce_add(reinterpret_cast<float*>(at), __uint_as_float(chunk.x), __uint_as_float(chunk.y),
                           __uint_as_float(chunk.z), __uint_as_float(chunk.w));
          continue;
        }
      }
      *reinterpret_cast<uint4*>(at) = chunk;
    }
  }
}

}  // namespace monoidreduce
