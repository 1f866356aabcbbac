// Makes tensor maps, the descriptors by which TMA addresses tensors.
#pragma once

#include <cuda.h>

#include "monoidreduce/device/arch/tma.cuh"
#include "monoidreduce/device/block/bias_tile.cuh"
#include "monoidreduce/launch/dense_lines.h"
#include "monoidreduce/launch/driver.cuh"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce::sm90 {

// The map of a tensor [B, H, rows, width], in boxes of box_heads heads with box_rows lines each. A line of a box has line_bytes
// bytes: 128 or 64, with the swizzle for that size, or 16, without one. Axes of stride 0 are broadcast.
inline arch::TensorMap encode_map(const TensorView& t, int box_rows, int line_bytes, int box_heads = 1) {
  const cuuint64_t bytes = static_cast<cuuint64_t>(item_size(t.dtype));
  const auto size = [&](int d) { return static_cast<cuuint64_t>(t.size[d]); };
  // The stride of a dimension of size 1 is never used, but must be a multiple of 16.
  const auto stride = [&](int d) {
    return t.size[d] > 1 ? static_cast<cuuint64_t>(t.stride[d]) * bytes : 16;
  };
  const cuuint64_t sizes[4] = {size(3), size(2), size(1), size(0)};
  const cuuint64_t strides[3] = {stride(2), stride(1), stride(0)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(line_bytes / bytes), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_heads), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto type = t.dtype == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    : t.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                    : t.dtype == DType::kBool    ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  static const auto encode = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const DeviceGuard device(t.cuda_device);
  arch::TensorMap map;
  static_assert(sizeof(map) == sizeof(CUtensorMap));
  const CUresult result = encode(reinterpret_cast<CUtensorMap*>(&map), type, 4, t.data, sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 line_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                 : line_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                    : CU_TENSOR_MAP_SWIZZLE_NONE,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw Error(message("cuTensorMapEncodeTiled failed with code ", int(result)));
  return map;
}

// The map of an operand, in lines of 128 bytes (device/block/shared_tile.cuh).
inline arch::TensorMap tensor_map(const TensorView& t, int box_rows, int box_heads = 1) {
  require_dense_lines(t);
  return encode_map(t, box_rows, 128, box_heads);
}

// The map of score biases (device/block/bias_tile.cuh), in tiles of `lines` lines. B: their element type; void: there are none.
template <class B>
BiasSource bias_source(const TensorView& bias, int lines) {
  if constexpr (std::is_void_v<B>) {
    return {};
  } else {
    require_readable_lines(bias);
    if (rows_share(bias)) lines = kSharedLines;
    return {encode_map(bias, lines, BiasLine<B>::kBytes), lines};
  }
}

}  // namespace monoidreduce::sm90
