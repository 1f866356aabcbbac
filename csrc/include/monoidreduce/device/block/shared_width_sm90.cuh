// Products of float32 operands in planes (planes_sm90.cuh) whose width the two blocks of a cluster share: each has half of
// it. A block multiplies over its half, and sends the dot products to the other one, which adds them to its own. Both then
// have the same bits, since a + b = b + a.
//
// A Tile says how many blocks share a width, kBlocks. If it is 1, nothing here costs anything.
#pragma once

#include <type_traits>

#include "monoidreduce/device/arch/cluster.cuh"
#include "monoidreduce/device/arch/store_async.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/planes_sm90.cuh"
#include "monoidreduce/device/block/ring.cuh"

namespace monoidreduce::sm90 {

// What a block receives: fragments of 64 x 64 dot products, in chunks of 16 columns. kSlots: chunks that a consumer has room for.
template <int kConsumers, int kSlots>
struct PartialDotsMemory {
  static constexpr int kElements = 8, kVectors = kElements / 4;  // of a chunk, in each thread
  static constexpr int kBytes = kWarpgroup * kElements * sizeof(float);
  float4 slot[kConsumers][kSlots][kVectors][kWarpgroup];
  arch::Mbarrier arrived[kConsumers][kSlots];

  // Called by one thread before any block of the cluster uses the memory.
  __device__ __forceinline__ void init() {
    for (auto& of_consumer : arrived)
      for (arch::Mbarrier& barrier : of_consumer) arch::init(&barrier, 1);
  }
};

// The exchange between a consumer and the consumer of the same number in the other block. A chunk may be sent once the other one
// has read the chunk that was in its slot. It says so by sending a chunk after that. When all chunks of a fragment have arrived,
//   - with slots for two fragments, all of one are sent before any is received: the other one has read the fragment before;
//   - with fewer slots the last chunk is sent after the others have been received: the other one has read all but its last chunk.
template <int kConsumers, int kSlots>
struct PartialDots {
  using Memory = PartialDotsMemory<kConsumers, kSlots>;
  static constexpr int kElements = Memory::kElements;
  RingPosition<kSlots> at{};

  // Adds the other block's dot products to dots. All threads of the consumer must call it.
  template <int kSize>
  __device__ __forceinline__ void add(float (&dots)[kSize], Memory& memory, int consumer) {
    // Chunks that are sent before the first one is received.
    constexpr int kChunks = kSize / kElements, kAhead = kSlots == 2 * kChunks ? kChunks : kSlots - 1;
    static_assert(kAhead == kChunks || (kAhead > 0 && kAhead < kChunks));
    RingPosition<kSlots> sent = at;
    arch::fence_async_shared();
#pragma unroll
    for (int chunk = 0; chunk < kAhead; ++chunk, sent.advance())
      send(dots, chunk, memory, consumer, sent.stage);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk, at.advance()) {
      receive(dots, chunk, memory, consumer);
      if (chunk + 1 < kAhead || chunk + 1 == kChunks) continue;
      arch::fence_async_shared();
      send(dots, chunk + 1, memory, consumer, sent.stage);
      sent.advance();
    }
    arch::pin(dots);
  }

 private:
  // The address in the other block.
  __device__ __forceinline__ static arch::SharedAddress there(const void* p) {
    return arch::map_to_rank(p, arch::cluster_rank() ^ 1);
  }
  template <int kSize>
  __device__ __forceinline__ void send(const float (&dots)[kSize], int chunk, Memory& memory, int consumer,
                                       int slot) {
    const arch::SharedAddress barrier = there(&memory.arrived[consumer][slot]);
#pragma unroll
    for (int n = 0; n < Memory::kVectors; ++n)
      arch::store_async(there(&memory.slot[consumer][slot][n][threadIdx.x % kWarpgroup]),
                        &dots[chunk * kElements + 4 * n], barrier);
  }
  template <int kSize>
  __device__ __forceinline__ void receive(float (&dots)[kSize], int chunk, Memory& memory, int consumer) {
    arch::Mbarrier* const arrived = &memory.arrived[consumer][at.stage];
    if (threadIdx.x % kWarpgroup == 0) arch::arrive_expect(arrived, Memory::kBytes);
    arch::wait(arrived, at.parity);
#pragma unroll
    for (int n = 0; n < Memory::kVectors; ++n) {
      const float4 x = memory.slot[consumer][at.stage][n][threadIdx.x % kWarpgroup];
      float* const to = &dots[chunk * kElements + 4 * n];
      to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
    }
  }
};

struct NoPartialDots {
  __device__ __forceinline__ void init() {}
};
template <class Tile>
using PartialDotsOf = PartialDots<Tile::kConsumers, Tile::kSlots>;
template <class Tile>
using PartialDotsMemoryOf =
    std::conditional_t<Tile::kBlocks == 1, NoPartialDots, typename PartialDotsOf<Tile>::Memory>;

// The number of the calling block in its cluster.
template <class Tile>
__device__ __forceinline__ int block_of_cluster() {
  return Tile::kBlocks == 1 ? 0 : arch::cluster_rank();
}
// The first element of a block's part of a split row.
template <class Tile>
__device__ __forceinline__ int first_of_part() {
  return block_of_cluster<Tile>() * (PlaneTile<Tile::kWidth>::kLineOfBoth / 2);
}
// Waits for all threads of the cluster.
template <class Tile>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (Tile::kBlocks == 1) {
    __syncthreads();
  } else {
    arch::arrive_cluster();
    arch::wait_cluster();
  }
}

}  // namespace monoidreduce::sm90
