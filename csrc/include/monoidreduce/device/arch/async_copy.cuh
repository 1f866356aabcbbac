// Asynchronous copies from global to shared memory (cp.async): a thread starts them and waits for them later.
#pragma once

#include "monoidreduce/device/arch/shared_memory.cuh"

namespace monoidreduce::arch {

// threadIdx.x, read again from its special register. `volatile` keeps the compiler from holding an earlier
// value in a register.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Copies 16 bytes. Where `wanted` is false, writes 16 zero bytes and does not read `from`.
__device__ __forceinline__ void copy_async(SharedAddress to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}
// Makes one group of the thread's copies since the last commit.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kGroups of the thread's groups are still in flight.
template <int kGroups>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace monoidreduce::arch
