// Launches device/resident/row_residuals.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "monoidreduce/device/resident/row_residuals.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"

namespace monoidreduce {

template <class E>
void prepare_rows(const RowInputs& x, const RowResiduals& to, const Cleared& cleared, const Launch& launch) {
  const DeviceGuard device(x.out.cuda_device);
  const std::int64_t padded = x.out.size[0] * x.out.size[1] * to.padded_rows;
  const auto run = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    launch_kernel("prepare_rows", &prepare_rows<E, kLanes>, blocks_for(padded * kLanes / kPrepareThreads),
                  kPrepareThreads, 0, launch.stream, x, to, cleared);
  };
  if (x.out.size[3] <= 64) {
    run(std::integral_constant<int, 8>{});
  } else if (x.out.size[3] <= 128) {
    run(std::integral_constant<int, 16>{});
  } else {
    run(std::integral_constant<int, 32>{});
  }
}

}  // namespace monoidreduce
