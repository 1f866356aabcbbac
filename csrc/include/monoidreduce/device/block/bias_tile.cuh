// Tiles of score biases in shared memory, as TMA writes them, and access to the biases of a thread's
// fragment.
//
// One line holds biases of one row of the fold: 128 bytes (64 bytes for bool: 64 columns). Further columns
// are in further slabs. Lines are swizzled as in tiles of operands (shared_tile.cuh), lines of 64 bytes with
// the 64-byte swizzle, in pairs.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "monoidreduce/device/arch/shared_memory.cuh"
#include "monoidreduce/device/arch/tma.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/ring.cuh"
#include "monoidreduce/traits.h"

namespace monoidreduce {

// Where TMA loads bias tiles from, in boxes of `lines` lines. Where all rows have the same biases, a box has
// only 8 lines, which stand for all lines of the tile: the swizzle repeats after 8, and fewer lines read the
// same bytes less often.
struct BiasSource {
  arch::TensorMap map;
  int lines;
};
inline constexpr int kSharedLines = 8;

// What is added to a score, for two adjacent columns or for one. A bool bias adds 0, or -inf where it masks
// the score.
template <class B>
__device__ __forceinline__ float2 load_biases(arch::SharedAddress at) {
  if constexpr (std::is_same_v<B, float>) {
    return arch::load<float2>(at);
  } else if constexpr (std::is_same_v<B, bool>) {
    const std::uint32_t pair = arch::load<std::uint16_t>(at);
    return {pair & 0xff ? 0.f : -INFINITY, pair & 0xff00 ? 0.f : -INFINITY};
  } else {
    return arch::unpack<B>(arch::load<std::uint32_t>(at));
  }
}
template <class B>
__device__ __forceinline__ float load_bias(arch::SharedAddress at) {
  if constexpr (std::is_same_v<B, float>) {
    return arch::load<float>(at);
  } else if constexpr (std::is_same_v<B, bool>) {
    return arch::load<std::uint8_t>(at) ? 0.f : -INFINITY;
  } else {
    return arch::unpack<B>(arch::load<std::uint16_t>(at)).x;
  }
}

template <class B>
struct BiasLine {
  static constexpr int kColumns = sizeof(B) == 4 ? 32 : 64, kBytes = kColumns * static_cast<int>(sizeof(B));
};

template <class B, int kLines, int kColumns>
struct BiasTile {
  static constexpr int kLineColumns = BiasLine<B>::kColumns, kBytesOfLine = BiasLine<B>::kBytes;
  static constexpr int kSlabBytes = kLines * kBytesOfLine, kBytes = kSlabBytes * (kColumns / kLineColumns);
  static_assert(kSlabBytes % 1024 == 0 && kColumns % kLineColumns == 0);

  // Loads the box of kLines x kColumns that starts at (at.row, at.inner).
  __device__ __forceinline__ static void load(unsigned char* tile, const arch::TensorMap& map, arch::Box at,
                                              arch::Mbarrier* arrived) {
#pragma unroll
    for (int slab = 0; slab < kColumns / kLineColumns; ++slab) {
      arch::load(tile + slab * kSlabBytes, map, at, arrived);
      at.inner += kLineColumns;
    }
  }

  // Byte offset of an element of the first slab.
  __device__ __forceinline__ static int offset(int line, int column) {
    const int straight = line * kBytesOfLine + column * static_cast<int>(sizeof(B));
    return straight ^ (straight >> 7) % (kBytesOfLine / 16) * 16;
  }

  // Biases of a fragment whose rows are the tile's lines. shared: all rows have the same biases.
  struct OfRows {
    arch::SharedAddress start[2];
    __device__ __forceinline__ OfRows(const unsigned char* tile, bool shared) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int line = shared ? fragment_row(r) % kSharedLines : fragment_row(r);
        start[r] = arch::shared_address(tile) + offset(line, fragment_column(0));
      }
    }
    __device__ __forceinline__ arch::SharedAddress at(int i) const {
      const int across = i / 4 * 8 * static_cast<int>(sizeof(B));
      return (start[row_of_element(i)] ^ across % kBytesOfLine) + across / kBytesOfLine * kSlabBytes;
    }
    // The biases of elements i and i + 1.
    __device__ __forceinline__ float2 pair(int i) const { return load_biases<B>(at(i)); }
    __device__ __forceinline__ float operator[](int i) const {
      return load_bias<B>(at(i) + i % 2 * static_cast<int>(sizeof(B)));
    }
  };

  // Biases of a fragment whose rows are the tile's columns.
  struct OfColumns {
    arch::SharedAddress start;
    int step;  // bytes to the next 8 lines
    __device__ __forceinline__ OfColumns(const unsigned char* tile, bool shared)
        : step(shared ? 0 : 8 * kBytesOfLine) {
      static_assert(kColumns == kFragmentRows);
      const int column = fragment_row(0);
      start = arch::shared_address(tile) + column / kLineColumns * kSlabBytes +
              offset(fragment_column(0), column % kLineColumns);
    }
    __device__ __forceinline__ float operator[](int i) const {
      constexpr int kNextLine = kBytesOfLine == 128 ? kBytesOfLine | 16 : kBytesOfLine,
                    kNextRow = kThreadRowStep * static_cast<int>(sizeof(B));
      return load_bias<B>((start ^ row_of_element(i) * kNextRow ^ i % 2 * kNextLine) + i / 4 * step);
    }

   private:
    static constexpr int kThreadRowStep = 8;  // distance between the two rows of a thread
  };
};

// Bias tiles of a block in shared memory, a ring of stages for each consumer; empty where B is void. Must
// start on a multiple of 1024 bytes. kOthers: the bytes of shared memory that the block needs besides.
template <class B, int kConsumers_, int kLines, int kColumns, int kOthers>
struct BiasRings {
  static constexpr int kConsumers = kConsumers_;
  using Tile = BiasTile<B, kLines, kColumns>;
  static constexpr int kStages = kOthers + 2 * kConsumers * Tile::kBytes <= kSharedBytes ? 2 : 1;
  using Position = RingPosition<kStages>;

  unsigned char tiles[kConsumers][kStages][Tile::kBytes];
  Ring<kStages, ReadBy::kThreads> rings[kConsumers];

  __device__ __forceinline__ void init() {
    for (auto& ring : rings) ring.init(1);
  }
  // Called by the producer. box(consumer) is where a consumer's biases start.
  template <class BoxOf>
  __device__ __forceinline__ void load(const BiasSource& source, Position& at, BoxOf box) {
#pragma unroll
    for (int w = 0; w < kConsumers; ++w)
      Tile::load(tiles[w][at.stage], source.map, box(w),
                 rings[w].acquire(at, Tile::kBytes / kLines * source.lines));
    at.advance();
  }
  __device__ __forceinline__ const unsigned char* wait(int consumer, Position at) {
    rings[consumer].wait(at);
    return tiles[consumer][at.stage];
  }
  __device__ __forceinline__ void release(int consumer, Position& at) {
    rings[consumer].release(at);
    at.advance();
  }
};
template <int kConsumers, int kLines, int kColumns, int kOthers>
struct BiasRings<void, kConsumers, kLines, kColumns, kOthers> {
  struct Position {};
  __device__ __forceinline__ void init() {}
};

// The element type of the biases that a score policy reads from tiles; void if it reads none.
template <class Scores>
struct BiasElementOf {
  using Type = void;
};
template <class Scores>
  requires ScoresWithTiles<Scores>
struct BiasElementOf<Scores> {
  using Type = typename Scores::BiasElement;
};
template <class Scores>
using BiasElement = typename BiasElementOf<Scores>::Type;
template <class Scores>
inline constexpr bool kBiasedByTile = !std::is_void_v<BiasElement<Scores>>;

}  // namespace monoidreduce
