// Launches device/resident/row_residuals.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "monoidreduce/device/resident/row_residuals.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"

namespace monoidreduce {

template <class E>
void prepare_rows(const RowInputs& x, const RowResiduals& to, const RowMarks& marks,
                  const ClearedWords& cleared, const Launch& launch) {
  const DeviceGuard device(x.out.cuda_device);
  const std::int64_t padded = x.out.size[0] * x.out.size[1] * to.padded_rows;
  const auto run = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    launch_kernel("prepare_rows", &prepare_rows<E, kLanes>, blocks_for(padded * kLanes / kPrepareThreads),
                  kPrepareThreads, 0, launch.stream, x, to, marks, cleared);
  };
  if (x.out.size[3] <= 64) {
    run(std::integral_constant<int, 8>{});
  } else if (x.out.size[3] <= 128) {
    run(std::integral_constant<int, 16>{});
  } else {
    run(std::integral_constant<int, 32>{});
  }
  if (!x.banded) return;
  const std::int64_t column_marks = x.out.size[0] * x.column_heads * marks.column_units;
  launch_kernel("clear_marks", &clear_marks, blocks_for((column_marks + 255) / 256), 256, 0, launch.stream,
                marks.columns, column_marks);
}

}  // namespace monoidreduce
