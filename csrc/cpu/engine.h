// The entry points of the CPU engine. A source that is compiled for an instruction set defines run() of its calls in the
// namespace of that set.
#pragma once

#include "monoidreduce/cpu/isa.h"
#include "monoidreduce/error.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce {
struct CpuTiles;
}

namespace monoidreduce::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };
const char* name(Isa isa);
// The best instruction set for this dtype that both this build and this processor have, unless MONOIDREDUCE_CPU_ISA names
// another.
Isa isa_for(DType dtype);

namespace baseline {
template <class Call>
void run(const Call& x, const Launch& launch);
}
namespace avx2 {
template <class Call>
void run(const Call& x, const Launch& launch);
}
namespace avx512 {
template <class Call>
void run(const Call& x, const Launch& launch);
}
namespace avx512bf16 {
template <class Call>
void run(const Call& x, const Launch& launch);
}

template <class Call>
void run_by(Isa isa, const Call& x, const Launch& launch) {
  switch (isa) {
    case Isa::kBaseline:
      return baseline::run(x, launch);
#ifdef MONOIDREDUCE_WITH_AVX2
    case Isa::kAvx2:
      return avx2::run(x, launch);
#endif
#ifdef MONOIDREDUCE_WITH_AVX512
    case Isa::kAvx512:
      return avx512::run(x, launch);
#endif
#ifdef MONOIDREDUCE_WITH_AVX512BF16
    case Isa::kAvx512Bf16:
      return avx512bf16::run(x, launch);
#endif
    default:
      throw Error("this build lacks the code for an instruction set that was chosen");
  }
}

// Runs a call that is compiled once for all instruction sets. For SequenceSpans, throws if cu_seqlens is invalid.
template <class Call>
void run_alike(const Call& x);

// A query for the tiles in which a fold would be computed.
struct TileQuery {
  const FoldProblem& problem;
  bool bias_gradient;
  CpuTiles& tiles;
};

}  // namespace monoidreduce::cpu
