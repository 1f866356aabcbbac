// Launches device/contraction/weights_to_gradients.cuh.
#pragma once

#include "monoidreduce/device/contraction/weights_to_gradients.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"

namespace monoidreduce::sm90 {

// Turns the softmax weights that forward saved into dlogits, in place. p: the problem of the fold, with all of its rows.
template <class E, class Kept, class Rows>
void weights_to_gradients(const Kept& kept, const Rows& rows, const FoldProblem& p, const Launch& launch) {
  const DeviceGuard guard(p.a.cuda_device);
  launch_kernel("weights_to_gradients", &weights_to_gradients_kernel<E, Kept, Rows>, blocks_for(p.rows()),
                256, 0, launch.stream, kept, row_order(p), rows);
}

}  // namespace monoidreduce::sm90
