// Tiles in shared memory in the layout that TMA writes and wgmma reads.
//
// A tile of kRows x kWidth elements is a sequence of slabs. A slab covers 128 bytes of the width: kRows lines
// of 128 bytes. Elements have 16 bits unless said otherwise. Tiles start on a multiple of 1024 bytes.
//
// In each group of 8 lines, chunk c (16 bytes) of line r is stored as chunk c ^ (r % 8). This is TMA's
// 128-byte swizzle; it avoids bank conflicts whether lines or columns of chunks are read.
#pragma once

#include <cstdint>

#include "monoidreduce/device/arch/tma.cuh"
#include "monoidreduce/device/arch/wgmma.cuh"

namespace monoidreduce {

// The shared memory that a block may use, in bytes, less its alignment and barriers.
inline constexpr int kSharedBytes = (227 << 10) - 1024 - 512;
inline constexpr int kSlab = 64;        // 16-bit elements in a line
inline constexpr int kLineBytes = 128;  // length of a line
// Elements of type E in a line.
template <class E>
inline constexpr int kSlabOf = kLineBytes / static_cast<int>(sizeof(E));
inline constexpr int kProductDepth = 16;  // depth (K) of one wgmma instruction for 16-bit elements

// The offset of a 16-byte chunk in a slab, in bytes.
__host__ __device__ constexpr int place_of(int line, int chunk) {
  return line * kLineBytes + (chunk ^ (line % 8)) * 16;
}

template <int kRows, int kWidth, class E = std::uint16_t>
struct SharedTile {
  static_assert(kRows % 8 == 0 && kWidth % kSlabOf<E> == 0);
  static constexpr int kSlabBytes = kRows * kLineBytes;
  static constexpr int kBytes = kSlabBytes * (kWidth / kSlabOf<E>);

  unsigned char* data;

  // Loads the box of kRows x kWidth that starts at (at.row, at.inner).
  __device__ __forceinline__ void load(const arch::TensorMap& map, arch::Box at,
                                       arch::Mbarrier* arrived) const {
#pragma unroll
    for (int slab = 0; slab < kWidth / kSlabOf<E>; ++slab) {
      arch::load(data + slab * kSlabBytes, map, at, arrived);
      at.inner += kSlabOf<E>;
    }
  }
};

// The wgmma descriptor of an operand in a tile (PTX ISA, "Asynchronous warpgroup level matrix shared memory
// layout"), at step 0 of the product's depth. Its low word holds the address and the distance between slabs
// in units of 16 bytes, so that moving to another step is one addition.
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

// Descriptors of an operand whose depth is the tile's width: step k is 16 elements of every line. at: the
// address of the first line.
template <int kRows>
struct AlongWidth {
  MatrixDescriptor start;
  __host__ __device__ __forceinline__ explicit AlongWidth(arch::SharedAddress at) : start(at, 16) {}
  __host__ __device__ __forceinline__ std::uint64_t operator[](int k) const {
    constexpr int kSteps = kSlab / kProductDepth;
    return start + (k / kSteps * kRows * kLineBytes + k % kSteps * 2 * kProductDepth);
  }
};
// Descriptors of an operand whose depth is the tile's lines: step k is 16 lines of every slab. at: the
// address of the first slab.
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
