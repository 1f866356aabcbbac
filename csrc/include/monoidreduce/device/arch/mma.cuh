// A warp's matrix product mma.sync, d (16 x 8 floats) += a (16 x depth) b (depth x 8), with all operands in
// registers. The depth is 32 bytes: 16 elements of 16 bits, or 8 floats. Also the transpose of an 8 x 8
// matrix.
#pragma once

#include "monoidreduce/device/arch/element.cuh"

namespace monoidreduce::arch {

// Each thread has 4 floats of d, 4 words of a and 2 words of b, laid out as in the PTX ISA, "Matrix fragments
// for mma.m16n8k16" (m16n8k8 for float). The instruction reads only the tf32 bits of a float: callers round
// operands first (round_to_tf32).
template <class E>
__device__ __forceinline__ void mma(float* d, const unsigned* a, const unsigned* b);
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float* d, const unsigned* a, const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma<__half>(float* d, const unsigned* a, const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma<float>(float* d, const unsigned* a, const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Rounds to tf32, 11 significant bits, ties away from zero.
__device__ __forceinline__ unsigned round_to_tf32(float x) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

// Transposes an 8 x 8 matrix of 16-bit elements; each lane holds two of them.
__device__ __forceinline__ unsigned transpose_matrix(unsigned word) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

}  // namespace monoidreduce::arch
