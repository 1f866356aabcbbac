// Flags in global memory, by which blocks signal their progress to each other.
#pragma once

namespace monoidreduce::arch {

// Acquire load: what another block wrote before it released the returned value (add_release) is visible after
// it.
__device__ __forceinline__ unsigned load_acquire(const unsigned* at) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void add_release(unsigned* at, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

// Orders what an acquire load made visible before the bulk copies of global memory that are issued after the
// fence.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace monoidreduce::arch
