// Loads and stores of shared memory by address, and the fence between them and what TMA and wgmma do.
#pragma once

namespace monoidreduce::arch {

using SharedAddress = unsigned;

__device__ __forceinline__ SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}

// Orders the thread's ordinary loads and stores of shared memory before the bulk copies and wgmma instructions that are issued
// after it, by this thread or by one that it tells so through a barrier. PTX says so of stores; that loads have ended was measured
// (docs/design/tried_and_dropped.md).
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void store(SharedAddress at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
__device__ __forceinline__ void store(SharedAddress at, unsigned x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
template <class Word>
__device__ __forceinline__ Word load(SharedAddress at);
template <>
__device__ __forceinline__ float2 load(SharedAddress at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}
template <>
__device__ __forceinline__ float load(SharedAddress at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
template <>
__device__ __forceinline__ unsigned load(SharedAddress at) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
template <>
__device__ __forceinline__ unsigned short load(SharedAddress at) {
  unsigned short x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
  return x;
}
template <>
__device__ __forceinline__ unsigned char load(SharedAddress at) {
  unsigned x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return static_cast<unsigned char>(x);
}
// Loads four 8 x 8 matrices of 16-bit elements, transposed or not. Lane l gives the address of row l % 8 of
// matrix l / 8, and receives two elements of each matrix.
template <bool kTransposed>
__device__ __forceinline__ void load_matrix_x4(unsigned (&words)[4], SharedAddress at) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
  }
}

// Stores four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(SharedAddress at, const unsigned (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Stores the same with each matrix transposed.
__device__ __forceinline__ void store_matrix_x4_transposed(SharedAddress at, const unsigned (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace monoidreduce::arch
