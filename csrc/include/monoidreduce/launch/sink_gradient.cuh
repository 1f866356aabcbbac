// Launches device/simt/sink_gradient.cuh.
#pragma once

#include "monoidreduce/device/simt/sink_gradient.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// The gradients of attention sinks; launches nothing if they are not wanted. x: a backward call of attention. rows: its row
// policy (ProductSource).
template <class M, class Rows, class Call>
void sink_gradient(const M& m, const Rows& rows, const Call& x, const Launch& launch) {
  using T = typename M::Real;
  const std::int64_t heads = x.q.size[1];
  if (!x.d_sinks.present() || heads == 0) return;
  const DeviceGuard device(x.q.cuda_device);
  launch_kernel("sink_gradient", &simt::sink_gradient<M, Rows>, static_cast<unsigned>(heads),
                simt::kSinkThreads, 0, launch.stream, m, rows, static_cast<const T*>(x.sinks.data),
                static_cast<T*>(x.d_sinks.data), x.q.size[0], x.q.size[2]);
}

}  // namespace monoidreduce
