// The instruction set that a translation unit is compiled for. Everything in cpu/ is in an inline namespace of that name, so
// objects compiled for different instruction sets share no symbols that the linker could mix up.
#pragma once

#ifndef MR_CPU_ISA
#if defined(__AVX512BF16__)
#define MR_CPU_ISA avx512bf16
#elif defined(__AVX512F__)
#define MR_CPU_ISA avx512
#elif defined(__AVX2__) && defined(__FMA__)
#define MR_CPU_ISA avx2
#else
#define MR_CPU_ISA baseline
#endif
#endif

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// Whether this code is only for problems in which all operands are bfloat16, as the library's avx512bf16 build is. For other
// problems it would be the same as the avx512 build; they use that one, so that nothing is compiled twice.
#if defined(MR_CPU_BFLOAT16_ALONE)
inline constexpr bool kOnlyBFloat16 = true;
#else
inline constexpr bool kOnlyBFloat16 = false;
#endif

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64, kVectorRegisters = 32;
#elif defined(__AVX2__) && defined(__FMA__)
inline constexpr int kVectorBytes = 32, kVectorRegisters = 16;
#elif defined(__aarch64__)
inline constexpr int kVectorBytes = 16, kVectorRegisters = 32;
#else
inline constexpr int kVectorBytes = 16, kVectorRegisters = 16;
#endif

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
