// Tiles of score biases in shared memory, as TMA writes them, and the biases that belong to a thread's fragment.
//
// A line is a row of the fold: 128 bytes of its biases (64 columns of bool: 64 bytes), further columns in further slabs.
// They are swizzled as tiles of operands are (shared_tile.cuh), lines of 64 bytes in pairs.
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

// Where tiles come from: boxes of `lines` lines. Where rows share their biases, 8 lines stand for all lines
// of a tile. The swizzle repeats after 8, and fewer lines are fewer reads of the same bytes.
struct BiasSource {
  arch::TensorMap map;
  int lines;
};
inline constexpr int kSharedLines = 8;

// What is added to a score: two of adjacent columns, or one; -inf where bool says that the score is absent.
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

  // The box of kLines x kColumns that starts at (at.row, at.inner).
  __device__ __forceinline__ static void load(unsigned char* tile, const arch::TensorMap& map, arch::Box at,
                                              arch::Mbarrier* arrived) {
#pragma unroll
    for (int slab = 0; slab < kColumns / kLineColumns; ++slab) {
      arch::load(tile + slab * kSlabBytes, map, at, arrived);
      at.inner += kLineColumns;
    }
  }

  // Of a column of the first slab.
  __device__ __forceinline__ static int offset(int line, int column) {
    const int straight = line * kBytesOfLine + column * static_cast<int>(sizeof(B));
    return straight ^ (straight >> 7) % (kBytesOfLine / 16) * 16;
  }

  // Of a fragment whose rows are the tile's lines. shared: do the rows share their biases.
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
    __device__ __forceinline__ float2 pair(int i) const { return load_biases<B>(at(i)); }  // i and i + 1
    __device__ __forceinline__ float operator[](int i) const {
      return load_bias<B>(at(i) + i % 2 * static_cast<int>(sizeof(B)));
    }
  };

  // Of a fragment whose rows are the tile's columns.
  struct OfColumns {
    arch::SharedAddress start;
    int step;  // to the next 8 lines
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
    static constexpr int kThreadRowStep = 8;  // between the two rows of a thread
  };
};

// The biases of a block's consumers in shared memory, a ring of tiles for each; nothing where B is void. Starts on a multiple
// of 1024 bytes. kOthers: bytes that the block needs besides.
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
  // By the producer: box(consumer) is where a consumer's biases start.
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

// The element type of the biases that come in tiles, by the policy of scores; void for none.
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
