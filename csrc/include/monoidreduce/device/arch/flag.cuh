// Words in global memory by which blocks tell each other how far they are.
#pragma once

namespace monoidreduce::arch {

// What was written before the release of the value that it returns is seen after it.
__device__ __forceinline__ unsigned load_acquire(const unsigned* at) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void add_release(unsigned* at, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

// What a value that was acquired told of comes before the copies to global memory that are issued after it.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace monoidreduce::arch
