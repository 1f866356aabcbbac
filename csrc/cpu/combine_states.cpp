// Combines the results of several ranks, on the CPU.
#include "monoidreduce/ops/ranks.h"

#include "engine.h"

namespace monoidreduce::cpu {
namespace {

template <class Call>
void combine(const Call& x) {
  const auto with = [&]<class T>(T) {
    const auto rows = combined_rows<T>(x);
    for (std::int64_t row = 0; row < x.states.size[2]; ++row) combine_row(rows, row);
  };
  x.states.dtype == DType::kFloat64 ? with(0.0) : with(0.f);
}

}  // namespace

template <>
void run_alike(const CombinedLogSumExp& x) {
  combine(x);
}
template <>
void run_alike(const CombinedCrossEntropy& x) {
  combine(x);
}
template <>
void run_alike(const CombinedLogProbs& x) {
  combine(x);
}
template <>
void run_alike(const CombinedDistillation& x) {
  combine(x);
}

}  // namespace monoidreduce::cpu
