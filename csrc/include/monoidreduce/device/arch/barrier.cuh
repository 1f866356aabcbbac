// Barriers: of named groups of warps, and mbarriers in shared memory, which also count bytes that have arrived.
#pragma once

#include "monoidreduce/device/arch/shared_memory.cuh"

namespace monoidreduce::arch {

using Mbarrier = unsigned long long;

__device__ __forceinline__ void init(Mbarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers visible to the asynchronous units.
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;"); }

__device__ __forceinline__ void arrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expect(Mbarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Waits until the phase of the given parity has completed. The loop is in the assembly: around one in C++ the compiler
// sees threads part ways, and serialises the matrix products that follow.
__device__ __forceinline__ void wait(Mbarrier* barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again;}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Barrier id (1 to 15; 0 is __syncthreads) of `threads` threads, those that only arrive included.
__device__ __forceinline__ void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_threads(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace monoidreduce::arch
