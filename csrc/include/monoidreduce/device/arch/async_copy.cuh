// Copies from global to shared memory that a thread starts and waits for later.
#pragma once

#include "monoidreduce/device/arch/shared_memory.cuh"

namespace monoidreduce::arch {

// threadIdx.x, not to be kept from an earlier use.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// 16 bytes, or as many zeros where wanted is false: then from is not read.
__device__ __forceinline__ void copy_async(SharedAddress to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}
// The thread's copies since the last commit become one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kGroups of the thread's groups are on their way.
template <int kGroups>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace monoidreduce::arch
