// A warp's matrix product, d (16 x 8 floats) += a (16 x depth) b (depth x 8), all in registers, 32 bytes
// deep. And the transpose of an 8 x 8 matrix.
#pragma once

#include "monoidreduce/device/arch/element.cuh"

namespace monoidreduce::arch {

// d: 4 floats of the thread; a: 4 words; b: 2 words (PTX ISA, "Matrix fragments for mma.m16n8k16", for float m16n8k8).
// Of a float the product sees what round_to_tf32 leaves.
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

// To the 11 significant bits of tf32, ties away from zero.
__device__ __forceinline__ unsigned round_to_tf32(float x) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

// An 8 x 8 matrix of 16-bit elements, two in each lane, transposed.
__device__ __forceinline__ unsigned transpose_matrix(unsigned word) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

}  // namespace monoidreduce::arch
