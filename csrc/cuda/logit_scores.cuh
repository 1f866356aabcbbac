// The scores (logits) of linear heads with a bias or a softcap, on tensor cores.
#pragma once

#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/fold.h"

namespace monoidreduce::cuda {

// bias: [columns], or absent.
template <class E>
LogitScores<Bits, E> logit_scores(const FoldProblem& p, const TensorView& bias) {
  return {p.score, kLog2E, static_cast<const E*>(bias.data), bias.stride[0], static_cast<int>(p.columns())};
}

}  // namespace monoidreduce::cuda
