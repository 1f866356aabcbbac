// Stand-in for <cuda_fp16.h> where NVRTC compiles kernels: only what they use. NVRTC comes without CUDA's
// headers.
#pragma once

struct alignas(2) __half {
  unsigned short bits;

  __half() = default;
  __device__ __half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
struct alignas(4) __half2 {
  __half x, y;
};

__device__ inline __half __float2half_rn(float x) { return x; }
__device__ inline float __half2float(__half x) { return x; }
__device__ inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
__device__ inline unsigned short __half_as_ushort(__half x) { return x.bits; }
__device__ inline __half __ushort_as_half(unsigned short bits) {
  __half x;
  x.bits = bits;
  return x;
}
