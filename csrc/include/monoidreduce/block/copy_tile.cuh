// Tiles between global and shared memory, by the threads of a block.
#pragma once

#include "monoidreduce/arch/async_copy.cuh"
#include "monoidreduce/block/shared_tile.cuh"

namespace monoidreduce {

// A matrix of 16-bit elements, its lines dense and on 16-byte boundaries, width a multiple of 8.
struct Lines {
  char* data;
  std::int64_t stride;  // bytes
  int count, width;
};

inline constexpr int kChunkElements = 8, kChunksOfLine = kSlab / kChunkElements;

// Starts copying kLines x kWidth elements from (line0, element0) on into a tile; zeros where the matrix ends.
template <int kThreads, int kLines, int kWidth>
__device__ __forceinline__ void load_tile(arch::SharedAddress tile, const Lines& from, int line0,
                                          int element0) {
  constexpr int kStep = kThreads / kChunksOfLine;  // lines that the block copies at once
  static_assert(kLines % kStep == 0 && kStep % 8 == 0);
  const int line = threadIdx.x / kChunksOfLine, chunk = threadIdx.x % kChunksOfLine;
  const int element = element0 + chunk * kChunkElements;
  const char* source = from.data + (line0 + line) * from.stride + element * 2;
  const arch::SharedAddress to = tile + place_of(line, chunk);
#pragma unroll
  for (int n = 0; n < kLines / kStep; ++n) {
#pragma unroll
    for (int slab = 0; slab < kWidth / kSlab; ++slab) {
      arch::copy_async(to + (slab * kLines + n * kStep) * kLineBytes, source + slab * kLineBytes,
                       line0 + line + n * kStep < from.count && element + slab * kSlab < from.width);
    }
    source += kStep * from.stride;
  }
}

// Writes a tile to (line0, element0) on, as far as the matrix goes.
template <int kThreads, int kLines, int kWidth>
__device__ __forceinline__ void store_tile(const Lines& to, int line0, int element0,
                                           const unsigned char* tile) {
  constexpr int kStep = kThreads / kChunksOfLine;
  static_assert(kLines % kStep == 0 && kStep % 8 == 0);
  const int line = threadIdx.x / kChunksOfLine, chunk = threadIdx.x % kChunksOfLine;
  const int element = element0 + chunk * kChunkElements;
  const unsigned char* const source = tile + place_of(line, chunk);
#pragma unroll
  for (int n = 0; n < kLines / kStep; ++n) {
#pragma unroll
    for (int slab = 0; slab < kWidth / kSlab; ++slab) {
      if (line0 + line + n * kStep >= to.count || element + slab * kSlab >= to.width) continue;
      *reinterpret_cast<uint4*>(to.data + (line0 + line + n * kStep) * to.stride +
                                (element + slab * kSlab) * 2) =
          *reinterpret_cast<const uint4*>(source + (slab * kLines + n * kStep) * kLineBytes);
    }
  }
}

}  // namespace monoidreduce
