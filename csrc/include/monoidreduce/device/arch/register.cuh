// A copy between registers that the compiler keeps.
#pragma once

namespace monoidreduce::arch {

// x in another register. Branches that end in such copies stay branches; the compiler would make ordinary copies selections,
// which are computed for all branches.
__device__ __forceinline__ float copied(float x) {
  float y;
  asm volatile("mov.b32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace monoidreduce::arch
