// Named barriers of some of a block's warps (bar.sync), and mbarriers in shared memory, which also count the
// bytes of asynchronous copies.
#pragma once

#include "monoidreduce/device/arch/shared_memory.cuh"

namespace monoidreduce::arch {

using Mbarrier = unsigned long long;

__device__ __forceinline__ void init(Mbarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised mbarriers visible to TMA and to the other blocks of a cluster.
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;"); }

__device__ __forceinline__ void arrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expect(Mbarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Waits until the phase of the given parity has completed. The loop is in the assembly: around a C++ loop the
// compiler assumes that threads diverge, and serialises the wgmma instructions that follow.
__device__ __forceinline__ void wait(Mbarrier* barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again;}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Named barrier `id`, 1 to 15 (0 is __syncthreads). `threads` counts all that take part, including those that
// only arrive.
__device__ __forceinline__ void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_threads(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace monoidreduce::arch
