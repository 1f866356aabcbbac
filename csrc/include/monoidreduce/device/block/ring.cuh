// A ring of stages in shared memory between a producer and its consumers (a TMA pipeline).
#pragma once

#include "monoidreduce/device/arch/cluster.cuh"
#include "monoidreduce/device/arch/warpgroup.cuh"

namespace monoidreduce {

// A position in a ring. Producers and consumers walk it in the same order.
template <int kStages>
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// What reads the stages of a ring decides which threads may release them.
enum class ReadBy {
  // Only wgmma. A product is the whole warpgroup's: the thread that has waited for it releases for all four
  // warps.
  kProducts,
  // Loads of threads too. Warps of a warpgroup drift apart, so each releases when its own lanes have read. The lanes fence their
  // loads first: an arrival at an mbarrier overtakes loads that still wait for shared memory while other warps multiply, and TMA
  // then overwrites what they are about to read.
  kThreads,
};

template <int kStages, ReadBy kReadBy>
struct Ring {
  arch::Mbarrier full[kStages];   // completes when the producer and the bytes of the stage have arrived
  arch::Mbarrier empty[kStages];  // completes when every reader has released the stage

  // Called by one thread before any other uses the ring. warpgroups: how many read each stage; warps: how
  // many single warps read it besides.
  __device__ __forceinline__ void init(int warpgroups, int warps = 0) {
    constexpr int kReleases = kReadBy == ReadBy::kThreads ? 4 : 1;  // of each warpgroup
    for (int stage = 0; stage < kStages; ++stage) {
      arch::init(&full[stage], 1);
      arch::init(&empty[stage], kReleases * warpgroups + warps);
    }
  }
  // Producer: waits until the stage is free, writes to it, and announces how many bytes asynchronous copies
  // will bring. In the first round all stages are free.
  template <class Write>
  __device__ __forceinline__ arch::Mbarrier* acquire(RingPosition<kStages> at, int bytes, Write write) {
    arch::wait(&empty[at.stage], at.parity ^ 1);
    write();
    arch::arrive_expect(&full[at.stage], bytes);
    return &full[at.stage];
  }
  __device__ __forceinline__ arch::Mbarrier* acquire(RingPosition<kStages> at, int bytes) {
    return acquire(at, bytes, [] {});
  }
  // Consumer: waits until the stage is full.
  __device__ __forceinline__ void wait(RingPosition<kStages> at) { arch::wait(&full[at.stage], at.parity); }
  // Consumer: called by all threads that read the stage, once they have read it or have waited for the
  // products that read it.
  __device__ __forceinline__ void release(RingPosition<kStages> at) {
    if constexpr (kReadBy == ReadBy::kThreads) {
      arch::fence_async_shared();
      __syncwarp();
      if (arch::elect()) arch::arrive(&empty[at.stage]);
    } else {
      if (threadIdx.x % kWarpgroup == 0) arch::arrive(&empty[at.stage]);
    }
  }
  // The same where kBlocks blocks of a cluster write to each other's stages: a stage is free once it is free
  // in all blocks.
  template <int kBlocks>
  __device__ __forceinline__ void release_to_cluster(RingPosition<kStages> at) {
    static_assert(kReadBy == ReadBy::kProducts);
    const int block = threadIdx.x % kWarpgroup;
    if (block < kBlocks) arch::arrive(arch::map_to_rank(&empty[at.stage], block));
  }
};

}  // namespace monoidreduce
