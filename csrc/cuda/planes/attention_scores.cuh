// The score policies of attention in planes.
#pragma once

#include "monoidreduce/device/block/bias_fragment.cuh"
#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/dense_lines.h"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce::cuda::planes {

// Calls run(scores) with the score policy that the problem needs. d_bias: added to; or absent.
template <class Run>
void with_scores(const FoldProblem& p, const TensorView& d_bias, Run run) {
  constexpr double kUnits = 1;  // natural ones
  const auto biased = [&]<class B, Softcap kSoftcap>(B, std::integral_constant<Softcap, kSoftcap>) {
    run(MemoryBiasedScores<Full, B, kSoftcap>{
        device_tensor(p.bias),
        {p.score, kUnits, rows_share(d_bias), !repeats(d_bias), device_tensor(d_bias)}});
  };
  const auto with_bias = [&](auto softcap) {
    if (p.bias.dtype == DType::kBool) return biased(false, softcap);
    biased(0.f, softcap);
  };
  const bool caps = p.score.softcap != 0;
  if (p.bias.present() && caps)
    with_bias(std::integral_constant<Softcap, Softcap::kPresent>{});
  else if (p.bias.present())
    with_bias(std::integral_constant<Softcap, Softcap::kAbsent>{});
  else if (caps)
    run(SoftcappedScores<Full>(p.score, kUnits));
  else
    run(ScaledScores<Full>(p.score, kUnits));
}

}  // namespace monoidreduce::cuda::planes
