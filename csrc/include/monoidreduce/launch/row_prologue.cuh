// Launches device/simt/row_prologue.cuh.
#pragma once

#include "monoidreduce/device/simt/row_prologue.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// Backward preprocess of attention's SIMT kernels: of_lse = grad_lse, centre = grad_lse - delta, with
// delta = <grad_out, out + out_low>.
//   grad_out, out, out_low  [B, H, M, D], any strides; grad_out and out_low may be absent, which means 0
//   grad_lse                [B, H, M], any strides; may be absent, which means 0
//   of_lse, centre          [B * H * M], the results
template <class T>
void row_centre(const TensorView& grad_out, const TensorView& out, const TensorView& out_low,
                const TensorView& grad_lse, T* of_lse, T* centre, const Launch& launch) {
  const std::int64_t rows = out.size[0] * out.size[1] * out.size[2];
  if (rows == 0) return;
  TensorView of_row = grad_lse;  // [B, H, M, 1]
  if (of_row.present()) of_row.rank = 4, of_row.size[3] = 1, of_row.stride[3] = 0;
  const DeviceGuard device(out.cuda_device);
  launch_kernel("row_centre", &simt::row_centre<T>,
                blocks_for((rows + simt::kRowsOfBlock - 1) / simt::kRowsOfBlock), 32 * simt::kRowsOfBlock, 0,
                launch.stream, device_tensor(grad_out), device_tensor(out), device_tensor(out_low),
                device_tensor(of_row), of_lse, centre);
}

}  // namespace monoidreduce
