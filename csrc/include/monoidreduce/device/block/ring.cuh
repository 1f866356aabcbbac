// A ring of stages in shared memory between a producer and consumers.
#pragma once

#include "monoidreduce/device/arch/cluster.cuh"

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

template <int kStages>
struct Ring {
  arch::Mbarrier full[kStages];   // completes when the producer and the bytes of the stage have arrived
  arch::Mbarrier empty[kStages];  // completes when every consumer has released the stage

  // By one thread, before any other uses the ring.
  __device__ __forceinline__ void init(int consumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      arch::init(&full[stage], 1);
      arch::init(&empty[stage], consumers);
    }
  }
  // Producer: waits for the stage to be free, writes to it, and says how many bytes will come by copies. The first time round
  // all stages are free.
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
  // Consumer.
  __device__ __forceinline__ void wait(RingPosition<kStages> at) { arch::wait(&full[at.stage], at.parity); }
  __device__ __forceinline__ void release(RingPosition<kStages> at) { arch::arrive(&empty[at.stage]); }
  // Consumer, where blocks of a cluster write to each other's stages: a stage is free when it is in all of them.
  __device__ __forceinline__ void release(RingPosition<kStages> at, int block) {
    arch::arrive(arch::in_block(&empty[at.stage], block));
  }
};

}  // namespace monoidreduce
