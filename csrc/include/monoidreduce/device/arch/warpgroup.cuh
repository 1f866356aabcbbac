// What a warp or a warpgroup (four warps) does as one: elect a lane, trade registers, order its matrix products.
#pragma once

namespace monoidreduce {
inline constexpr int kWarpgroup = 128;  // threads: four warps
}

namespace monoidreduce::arch {

// True in one lane of the warp.
__device__ __forceinline__ bool elect() {
  unsigned chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen != 0;
}

// A value that is the same in all lanes, as one that the compiler knows to be: branches on it keep the warp together.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Registers a thread of this warpgroup: those it gives up, others may take.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Registers written before it are seen by matrix products issued after it.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products issued since the last commit become one group.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kGroups groups are in flight.
template <int kGroups>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
// Keeps the compiler from moving accesses to accumulators across the waits and fences above.
template <int kSize>
__device__ __forceinline__ void pin(float (&accumulators)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

}  // namespace monoidreduce::arch
