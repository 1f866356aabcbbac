// Splits the rows of a tensor of heads into planes (contraction/split_planes.cuh has the format). Rows are narrow:
// kWidth / 4 lanes share one. A wider row is several lines, each of which has a part of its width and a scale of its own.
#pragma once

#include "monoidreduce/device/contraction/split_planes.cuh"
#include "monoidreduce/device/warp/lanes.cuh"

namespace monoidreduce {

// data: float32 [batch, heads, rows, width], where width is a multiple of 4. If stride[3] is 1, the elements of a row
// are adjacent, and rows are 16-byte aligned. If it is not, data is a transposed matrix, as w2 of an MLP is: its
// columns are the rows here, so elements that are adjacent in memory belong to different rows, which neighbouring
// warps read.
// out: dense, [batch, heads, rows, parts, 2 kWidth + 8].
struct HeadsToSplit {
  const float* data;
  std::int64_t stride[4];
  int heads, rows, width, parts;
  std::int64_t lines;  // batch * heads * rows * parts
  __half* out;
};

__device__ __forceinline__ int count_infinities(const float4& x) {
  return isinf(x.x) + isinf(x.y) + isinf(x.z) + isinf(x.w);
}

template <int kWidth>
inline constexpr int kLinesOfBlock = kPlaneThreads / (kWidth / 4);

template <int kWidth>
__global__ void __launch_bounds__(kPlaneThreads) split_heads_kernel(const __grid_constant__ HeadsToSplit p) {
  constexpr int kLanes = kWidth / 4;
  const std::int64_t line = std::int64_t{blockIdx.x} * kLinesOfBlock<kWidth> + threadIdx.x / kLanes;
  const int own = threadIdx.x % kLanes * 4;  // of the line
  const bool there = line < p.lines;
  float4 x{0.f, 0.f, 0.f, 0.f};
  const std::int64_t whole = line / p.parts;
  const int column = static_cast<int>(line - whole * p.parts) * kWidth + own;
  if (there && column < p.width) {
    const std::int64_t head = whole / p.rows, row = whole - head * p.rows, batch = head / p.heads;
    const std::int64_t step = p.stride[3];
    const float* const from = p.data + batch * p.stride[0] + (head - batch * p.heads) * p.stride[1] +
                              row * p.stride[2] + column * step;
    x = step == 1 ? *reinterpret_cast<const float4*>(from)
                  : float4{from[0], from[step], from[2 * step], from[3 * step]};
  }
  float scale =
      plane_scale(reduce_lanes<kLanes>(largest_of(x), [](unsigned a, unsigned b) { return ::max(a, b); }));
  // A dot product with a line of two infinities may be inf - inf, which is NaN. Planes with an infinite scale would give an
  // infinity. So the line's scale is NaN: all its dot products are NaN, and repair.cuh computes the results again in float.
  if (reduce_lanes<kLanes>(count_infinities(x), [](int a, int b) { return a + b; }) > 1) scale = NAN;
  if (!there) return;
  __half* const high = p.out + line * (2 * kWidth + 8) + own;
  store_split(x, {scale, scale, scale, scale}, high, high + kWidth);
  if (own == 0) *reinterpret_cast<float*>(high + 2 * kWidth) = scale;
}

}  // namespace monoidreduce
