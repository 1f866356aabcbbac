// What a warp or a warpgroup (four warps) does as one: elect a lane, reallocate registers (setmaxnreg), order
// its wgmma instructions.
#pragma once

namespace monoidreduce {
inline constexpr int kWarpgroup = 128;  // threads: four warps
}

namespace monoidreduce::arch {

// True in exactly one lane of the warp.
__device__ __forceinline__ bool elect() {
  unsigned chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen != 0;
}

// Tells the compiler that x is the same in all lanes, so that branches on it do not diverge.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// setmaxnreg: sets the registers per thread of this warpgroup. Producers give registers up, consumers take
// them.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Makes registers written before it visible to wgmma instructions issued after it.
__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Makes one group of the products issued since the last commit.
__device__ __forceinline__ void commit_wgmma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kGroups groups of products are in flight.
template <int kGroups>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
// Keeps the compiler from moving accesses to accumulators across the waits and fences above.
template <int kSize>
__device__ __forceinline__ void pin(float (&accumulators)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}
// The same for operands in registers.
template <int kSize>
__device__ __forceinline__ void pin(unsigned (&operand)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(operand[i])::"memory");
}

}  // namespace monoidreduce::arch
