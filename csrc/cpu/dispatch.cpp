// The CPU engine is compiled once per instruction set. This file chooses one of them at run time.
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "engine.h"
#include "monoidreduce/error.h"
#include "monoidreduce/operators.h"

namespace monoidreduce {
namespace cpu {
namespace {

// The instruction sets that this build has and this processor can run, worst first.
std::vector<Isa> isas() {
  std::vector<Isa> found{Isa::kBaseline};
#ifdef MONOIDREDUCE_WITH_AVX2
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2) found.push_back(Isa::kAvx2);
#endif
#ifdef MONOIDREDUCE_WITH_AVX512
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx512) found.push_back(Isa::kAvx512);
#ifdef MONOIDREDUCE_WITH_AVX512BF16  // extends avx512
  if (has_avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(Isa::kAvx512Bf16);
#endif
#endif
  return found;
}

Isa choose() {
  const auto available = isas();
  const char* wanted = std::getenv("MONOIDREDUCE_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return available.back();
  std::string names;
  for (const Isa isa : available) {
    if (std::string_view(name(isa)) == wanted) return isa;
    names += names.empty() ? "" : ", ";
    names += name(isa);
  }
  throw std::invalid_argument(message("MONOIDREDUCE_CPU_ISA: expected one of ", names,
                                      " (this build, this processor), got ", wanted));
}

Isa chosen() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace

const char* name(Isa isa) {
  constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512bf16"};
  return kNames[static_cast<int>(isa)];
}

// The avx512bf16 build has code only for bfloat16; other dtypes take avx512.
Isa isa_for(DType dtype) {
  const bool other = chosen() == Isa::kAvx512Bf16 && dtype != DType::kBFloat16;
  return other ? Isa::kAvx512 : chosen();
}

}  // namespace cpu

CpuTiles cpu_tiles(const FoldProblem& problem, bool bias_gradient, int threads) {
  CpuTiles tiles;
  const cpu::TileQuery query{problem, bias_gradient, tiles};
  cpu::run_by(cpu::isa_for(problem.a.dtype), query, {.threads = threads});
  return tiles;
}

const char* cpu_isa() { return name(cpu::chosen()); }

const char* cpu_isa(DType dtype) { return name(cpu::isa_for(dtype)); }

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const cpu::Isa isa : cpu::isas()) names.push_back(name(isa));
  return names;
}

}  // namespace monoidreduce
