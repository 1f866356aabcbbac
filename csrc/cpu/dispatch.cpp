// The CPU engine is compiled once per instruction set; here one of them is chosen, at run time.
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "engine.h"
#include "monoidreduce/error.h"

namespace monoidreduce {
namespace cpu {

namespace baseline {
extern const Engine engine;
}
namespace avx2 {
extern const Engine engine;
}
namespace avx512 {
extern const Engine engine;
}
namespace avx512bf16 {
extern const Engine engine;
}

namespace {

// Those that this processor can run, worst first.
std::vector<const Engine*> engines() {
  std::vector<const Engine*> found{&baseline::engine};
#ifdef MONOIDREDUCE_WITH_AVX2
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2) found.push_back(&avx2::engine);
#endif
#ifdef MONOIDREDUCE_WITH_AVX512
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx512) found.push_back(&avx512::engine);
#ifdef MONOIDREDUCE_WITH_AVX512BF16  // further instructions of avx512
  if (has_avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(&avx512bf16::engine);
#endif
#endif
  return found;
}

const Engine& choose() {
  const auto available = engines();
  const char* wanted = std::getenv("MONOIDREDUCE_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return *available.back();
  std::string names;
  for (const Engine* engine : available) {
    if (std::string_view(engine->isa) == wanted) return *engine;
    names += names.empty() ? "" : ", ";
    names += engine->isa;
  }
  throw std::invalid_argument(message("MONOIDREDUCE_CPU_ISA: expected one of ", names,
                                      " (this build, this processor), got ", wanted));
}

const Engine& engine() {
  static const Engine& chosen = choose();
  return chosen;
}

}  // namespace

const Engine& engine_for(DType dtype) {
#ifdef MONOIDREDUCE_WITH_AVX512BF16  // it has code for bfloat16 alone
  if (&engine() == &avx512bf16::engine && dtype != DType::kBFloat16) return avx512::engine;
#endif
  return engine();
}

}  // namespace cpu

CpuTiles cpu_tiles(const FoldProblem& problem, bool bias_gradient, int threads) {
  return cpu::engine_for(problem.a.dtype).fold_tiles(problem, bias_gradient, threads);
}

const char* cpu_isa() { return cpu::engine().isa; }

const char* cpu_isa(DType dtype) { return cpu::engine_for(dtype).isa; }

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const cpu::Engine* engine : cpu::engines()) names.push_back(engine->isa);
  return names;
}

}  // namespace monoidreduce
