// Stores rounded fragments from registers directly to a tensor, 64 columns at a time. The four lanes that
// share a row exchange elements, so that each stores 16 bytes.
#pragma once

#include "monoidreduce/device/block/copy_tile.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/warp/lanes.cuh"

namespace monoidreduce::sm80 {

// Stores to kOuts tensors [1, 1, rows, columns].
template <int kOuts_>
struct QuadStores {
  static constexpr int kOuts = kOuts_;
  struct Memory {};
  Lines outs[kOuts];

  // Stores the warp's rows of the 64 columns from (row0, column) on to the n-th tensor.
  template <int kStores>
  __device__ __forceinline__ void store(const std::uint32_t (&words)[kSlabElements / 2], int n, int row0,
                                        int column, int, Memory&, int) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < kThreadRowsOfFragment; ++r) {
        std::uint32_t chunk[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) chunk[i] = words[(half * 4 + i) * kThreadRowsOfFragment + r];
        transpose_quad(chunk);
        store_chunk(outs[n], row0 + fragment_row(r), column + (half * 4 + threadIdx.x % 4) * kChunkElements,
                    chunk);
      }
    }
  }
  __device__ __forceinline__ void finish() const {}

 private:
  __device__ __forceinline__ static void store_chunk(const Lines& to, int row, int column,
                                                     const std::uint32_t (&chunk)[4]) {
    if (row >= to.count) return;
    char* const place = to.data + row * to.stride + column * 2;
    if (column + kChunkElements <= to.width) {
      __stcs(reinterpret_cast<uint4*>(place), {chunk[0], chunk[1], chunk[2], chunk[3]});
    } else {
#pragma unroll
      for (int i = 0; i < kChunkElements; ++i) {
        if (column + i < to.width)
          reinterpret_cast<std::uint16_t*>(place)[i] = static_cast<std::uint16_t>(chunk[i / 2] >> i % 2 * 16);
      }
    }
  }
};

}  // namespace monoidreduce::sm80
