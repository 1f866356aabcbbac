// Which activations have kernels of their own.
#pragma once

#include "monoidreduce/monoids/sum.h"

namespace monoidreduce::cuda {

// Calls run(monoid) with the monoid type that a kernel is compiled for. The four activations that most models
// use have kernels of their own, if a kernel for all activations is slower for most of them. The others share
// one kernel (NamedSum), because compiling a kernel takes most of a second. In the shared one, a warp starts
// on what follows the branch to an activation only after the branch. (H100, 16384 rows and units, width 128,
// Hopper's backward pass, own and shared kernel: in bfloat16 gelu_tanh 0.58 and 0.62 ms, gelu 0.87 and 0.90;
// in float16 0.63 and 0.75. sm_80's forward pass, 8192 units, width 64: 0.151 and 0.174; 4096 units, in
// float, 0.153 and 0.201.)
template <class M, class Run>
void with_own_kernel(const M& m, Run run) {
  run(m);
}
template <class R, class Run>
void with_own_kernel(const NamedSum<R>& named, Run run) {
  using enum ActivationKind;
  switch (named.kind) {
    case kRelu:
      return run(Sum<R, Relu>{});
    case kGelu:
      return run(Sum<R, Gelu>{});
    case kGeluTanh:
      return run(Sum<R, GeluTanh>{});
    case kSilu:
      return run(Sum<R, Silu>{});
    default:
      return run(named);
  }
}

}  // namespace monoidreduce::cuda
