// Splits float32 numbers into two planes of float16, so that tensor cores can multiply them: with the scale of
// its line, a power of two, a number is
//   x = scale * (high + low)    high = x / scale rounded to float16, low = the rest rounded to float16
// The scale brings the largest number of the line to between 2^13 and 2^14. High and low have 22 bits of a number
// that is not below 2^-14 of it, and an error of at most 2^-39 of it for smaller ones.
//
// A line that holds NaN has the scale NaN, so that all its products are NaN. A line that holds infinities has the
// scale infinity, and planes that are 0 but for the infinities: its products are then infinite with the sign that
// float32 gives, or NaN where float32 gives that for a factor of 0.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "monoidreduce/device/warp/lanes.cuh"

namespace monoidreduce {

inline constexpr int kPlaneThreads = 256;
// The high and the low plane of a line begin on multiples of this many elements, one step of the contraction.
inline constexpr int kPlaneStep = 64;

// The scale of a line. largest: the bits of its largest magnitude. Those of NaN are larger than any number's.
__device__ __forceinline__ float plane_scale(unsigned largest) {
  constexpr unsigned kInfinity = 0x7f800000u;
  if (largest >= kInfinity) return __uint_as_float(largest);
  if (largest == 0) return 1.f;
  constexpr int kTop = 13;  // the exponent to which the largest number is brought
  const int exponent = static_cast<int>(largest >> 23) - kTop;
  return __uint_as_float(static_cast<unsigned>(::max(exponent, 1)) << 23);
}

struct PlaneNumber {
  __half high, low;
};
__device__ __forceinline__ PlaneNumber split(float x, float scale) {
  if (!(::fabsf(scale) < INFINITY)) {
    const float high = ::isinf(x) && ::isinf(scale) ? ::copysignf(65504.f, x) : 0.f;
    return {__float2half_rn(high), __float2half_rn(0.f)};
  }
  const float scaled = x * (1.f / scale);
  const __half high = __float2half_rn(scaled);
  return {high, __float2half_rn(scaled - __half2float(high))};
}

// Stores both planes of four adjacent numbers.
__device__ __forceinline__ void store_split(const float4& x, const float4& scale, __half* high, __half* low) {
  const PlaneNumber n[4] = {split(x.x, scale.x), split(x.y, scale.y), split(x.z, scale.z),
                            split(x.w, scale.w)};
  __align__(8) const __half highs[4] = {n[0].high, n[1].high, n[2].high, n[3].high};
  __align__(8) const __half lows[4] = {n[0].low, n[1].low, n[2].low, n[3].low};
  *reinterpret_cast<uint2*>(high) = *reinterpret_cast<const uint2*>(highs);
  *reinterpret_cast<uint2*>(low) = *reinterpret_cast<const uint2*>(lows);
}
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ unsigned largest_of(const float4& x) {
  return ::max(::max(magnitude(x.x), magnitude(x.y)), ::max(magnitude(x.z), magnitude(x.w)));
}

// A matrix [rows, columns] of float32. Lines are aligned to 16 bytes, and have memory up to a multiple of 4 columns.
struct FloatLines {
  const float* data;
  std::int64_t pitch;
  int rows, columns;

  // Four adjacent numbers of a row, 0 behind the last column.
  __device__ __forceinline__ float4 four(std::int64_t row, int column) const {
    if (column >= columns) return {0.f, 0.f, 0.f, 0.f};
    float4 x = *reinterpret_cast<const float4*>(data + row * pitch + column);
    if (column + 1 >= columns) x.y = 0.f;
    if (column + 2 >= columns) x.z = 0.f;
    if (column + 3 >= columns) x.w = 0.f;
    return x;
  }
};

// Splits the rows of x, one block for each row. out: [rows, out_pitch], a row is
//   high [plane], low [plane], scale (float32), unused up to out_pitch
// where plane is the number of columns rounded up to kPlaneStep, with zeros behind the last column. by: [columns],
// factors of the columns, by which the numbers are multiplied first; or null.
static __global__ void __launch_bounds__(kPlaneThreads)
    split_rows_kernel(const __grid_constant__ FloatLines x, const float* by, __half* out,
                      std::int64_t out_pitch, int plane) {
  const std::int64_t row = blockIdx.x;
  const auto four = [&](int column) {
    float4 numbers = x.four(row, column);
    if (by == nullptr) return numbers;
    const auto factor = [&](int i) { return by[::min(column + i, x.columns - 1)]; };
    numbers.x *= factor(0), numbers.y *= factor(1), numbers.z *= factor(2), numbers.w *= factor(3);
    return numbers;
  };
  unsigned largest = 0;
  for (int column = 4 * threadIdx.x; column < x.columns; column += 4 * kPlaneThreads)
    largest = ::max(largest, largest_of(four(column)));
  __shared__ unsigned of_warps[kPlaneThreads / 32];
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kPlaneThreads / 32; ++warp) largest = ::max(largest, of_warps[warp]);

  const float scale = plane_scale(largest);
  __half* const high = out + row * out_pitch;
  for (int column = 4 * threadIdx.x; column < plane; column += 4 * kPlaneThreads)
    store_split(four(column), {scale, scale, scale, scale}, high + column, high + plane + column);
  if (threadIdx.x == 0) *reinterpret_cast<float*>(high + 2 * plane) = scale;
}

// Splits x with a scale for each column, in two passes. A block has kColumnLanes * 4 columns and kRowsOfBlock rows.
// by: [rows], factors of the rows; or null.
inline constexpr int kColumnLanes = 32, kRowsOfBlock = 128;

// Calls run(row, numbers) for four columns of the block's rows that a thread has.
template <class Run>
__device__ __forceinline__ void each_row_of_block(const FloatLines& x, const float* by, int column, Run run) {
  const int begin = blockIdx.y * kRowsOfBlock, end = ::min(begin + kRowsOfBlock, x.rows);
  for (int row = begin + threadIdx.x / kColumnLanes; row < end; row += kPlaneThreads / kColumnLanes) {
    float4 numbers = x.four(row, column);
    const float factor = by == nullptr ? 1.f : by[row];
    numbers.x *= factor, numbers.y *= factor, numbers.z *= factor, numbers.w *= factor;
    run(row, numbers);
  }
}
__device__ __forceinline__ int first_column_of_thread() {
  return 4 * (blockIdx.x * kColumnLanes + threadIdx.x % kColumnLanes);
}

// The largest magnitudes of the columns: largest [columns], which is 0 at first.
static __global__ void __launch_bounds__(kPlaneThreads)
    largest_of_columns_kernel(const __grid_constant__ FloatLines x, const float* by, unsigned* largest) {
  const int column = first_column_of_thread();
  unsigned found[4] = {0, 0, 0, 0};
  each_row_of_block(x, by, column, [&](int, const float4& n) {
    const float numbers[4] = {n.x, n.y, n.z, n.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) found[i] = ::max(found[i], magnitude(numbers[i]));
  });
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < x.columns) ::atomicMax(largest + column + i, found[i]);
  }
}

// out: [rows, out_pitch], a row is high [plane], low [plane]. scales: [columns], written.
static __global__ void __launch_bounds__(kPlaneThreads)
    split_columns_kernel(const __grid_constant__ FloatLines x, const float* by, const unsigned* largest,
                         __half* out, std::int64_t out_pitch, int plane, float* scales) {
  const int column = first_column_of_thread();
  if (column >= plane) return;
  float scale[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool there = column + i < x.columns;
    scale[i] = there ? plane_scale(largest[column + i]) : 1.f;
    if (there && blockIdx.y == 0 && threadIdx.x < kColumnLanes) scales[column + i] = scale[i];
  }
  each_row_of_block(x, by, column, [&](int row, const float4& numbers) {
    __half* const high = out + row * out_pitch + column;
    store_split(numbers, {scale[0], scale[1], scale[2], scale[3]}, high, high + plane);
  });
}

}  // namespace monoidreduce
