// Approximate math functions of one instruction, and conversion between pairs of floats and 16-bit elements.
#pragma once

#include "monoidreduce/device/arch/element.cuh"

namespace monoidreduce::arch {

// Relative error 2^-22; subnormal results are 0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The absolute error is 2^-22 for x from 1/2 to 2; elsewhere that is the relative error. A subnormal x gives
// -inf.
__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Relative error 2^-11.
__device__ __forceinline__ float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds two floats to nearest and packs them into one register, `low` in the low half.
template <class E>
__device__ __forceinline__ unsigned pack(float low, float high);
template <>
__device__ __forceinline__ unsigned pack<__nv_bfloat16>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ unsigned pack<__half>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// The two elements of a register as floats, the low half first.
template <class E>
__device__ __forceinline__ float2 unpack(unsigned pair);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(unsigned pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 unpack<__half>(unsigned pair) {
  float2 elements;
  asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(elements.x), "=f"(elements.y)
      : "r"(pair));
  return elements;
}

}  // namespace monoidreduce::arch
