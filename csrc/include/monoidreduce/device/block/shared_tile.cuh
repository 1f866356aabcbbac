// Tiles in shared memory as TMA writes them and the matrix products read them.
//
// A tile of kRows x kWidth elements is a sequence of slabs. A slab is 128 bytes of the width: kRows lines of 128 bytes.
// Elements have 16 bits unless said otherwise. Tiles start on a multiple of 1024 bytes.
//
// Within each group of 8 lines, chunk c (16 bytes) of line r is stored at chunk c ^ (r % 8). This is the 128-byte swizzle,
// which avoids bank conflicts in both reading directions.
#pragma once

#include <cstdint>

#include "monoidreduce/device/arch/tma.cuh"
#include "monoidreduce/device/arch/wgmma.cuh"

namespace monoidreduce {

// The shared memory that a block may use, less its alignment and barriers.
inline constexpr int kSharedBytes = (227 << 10) - 1024 - 512;
inline constexpr int kSlab = 64;        // elements of a line
inline constexpr int kLineBytes = 128;  // of a slab
template <class E>
inline constexpr int kSlabOf = kLineBytes / static_cast<int>(sizeof(E));
inline constexpr int kProductDepth = 16;

// Where a chunk of 16 bytes lies in a slab, in bytes.
__host__ __device__ constexpr int place_of(int line, int chunk) {
  return line * kLineBytes + (chunk ^ (line % 8)) * 16;
}

template <int kRows, int kWidth, class E = std::uint16_t>
struct SharedTile {
  static_assert(kRows % 8 == 0 && kWidth % kSlabOf<E> == 0);
  static constexpr int kSlabBytes = kRows * kLineBytes;
  static constexpr int kBytes = kSlabBytes * (kWidth / kSlabOf<E>);

  unsigned char* data;

  // The box of kRows x kWidth that starts at (at.row, at.inner).
  __device__ __forceinline__ void load(const arch::TensorMap& map, arch::Box at,
                                       arch::Mbarrier* arrived) const {
#pragma unroll
    for (int slab = 0; slab < kWidth / kSlabOf<E>; ++slab) {
      arch::load(data + slab * kSlabBytes, map, at, arrived);
      at.inner += kSlabOf<E>;
    }
  }
};

// The descriptor of an operand in a tile (PTX ISA, "Asynchronous warpgroup level matrix shared memory layout"), at step
// 0 of a product's depth. Its low word holds the address and the distance of slabs in units of 16 bytes, so that a step
// is an addition.
struct MatrixDescriptor {
  std::uint32_t low;

  __host__ __device__ __forceinline__ MatrixDescriptor(arch::SharedAddress at, int slab_bytes)
      : low((at & 0x3ffff) >> 4 | static_cast<std::uint32_t>(slab_bytes >> 4) << 16) {}
  __host__ __device__ __forceinline__ std::uint64_t operator+(int bytes) const {
    constexpr std::uint64_t kGroupOfLines = 1024 >> 4, kSwizzle128 = 1;
    return std::uint64_t{low + static_cast<std::uint32_t>(bytes >> 4)} | kGroupOfLines << 32 |
           kSwizzle128 << 62;
  }
};

// Steps of the products over the width of a tile: 16 elements of each line. at: of the first line.
template <int kRows>
struct AlongWidth {
  MatrixDescriptor start;
  __host__ __device__ __forceinline__ explicit AlongWidth(arch::SharedAddress at) : start(at, 16) {}
  __host__ __device__ __forceinline__ std::uint64_t operator[](int k) const {
    constexpr int kSteps = kSlab / kProductDepth;
    return start + (k / kSteps * kRows * kLineBytes + k % kSteps * 2 * kProductDepth);
  }
};
// Steps of the products over the rows of a tile: 16 lines of every slab. at: of the first slab.
template <int kRows>
struct AlongRows {
  MatrixDescriptor start;
  __host__ __device__ __forceinline__ explicit AlongRows(arch::SharedAddress at)
      : start(at, kRows * kLineBytes) {}
  __host__ __device__ __forceinline__ std::uint64_t operator[](int k) const {
    return start + k * kProductDepth * kLineBytes;
  }
};

}  // namespace monoidreduce
