// Atomic additions to global memory that return nothing.
#pragma once

namespace monoidreduce::arch {

// Adds four floats at a 16-byte boundary, from sm_90 on in one instruction. Additions by several threads
// happen in any order.
__device__ __forceinline__ void reduce_add(float* to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}

}  // namespace monoidreduce::arch
