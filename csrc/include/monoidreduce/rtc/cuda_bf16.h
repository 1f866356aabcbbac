// Stand-in for <cuda_bf16.h> where NVRTC compiles kernels: only what they use. NVRTC comes without CUDA's
// headers.
#pragma once

struct alignas(2) __nv_bfloat16 {
  unsigned short bits;

  __nv_bfloat16() = default;
  __device__ __nv_bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};

__device__ inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
__device__ inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
