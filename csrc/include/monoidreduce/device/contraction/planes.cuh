// Operands of the contraction that are float32 numbers in two planes of float16 (split_planes.cuh writes them).
#pragma once

#include <cstdint>

#include "monoidreduce/device/block/fragment.cuh"

namespace monoidreduce {

// The scales of an operand's lines: a line's numbers are its scale times the sum of its planes.
struct LineScales {
  const float* first;  // of line 0; null: they are not multiplied by
  std::int64_t pitch;  // floats between lines
  int lines;

  __device__ __forceinline__ float operator[](int line) const {
    return first == nullptr ? 1.f : first[::min(line, lines - 1) * pitch];
  }
};

// Corrects a dot product of planes. wgmma truncates its sums, so dot products come out too small, and in logits such an error would
// not average out. On an H200 they were too small by 5.5e-8 of themselves for normal numbers and 64 to 4096 terms, and by 8.1e-8
// for positive numbers. These are figures for wgmma sums of at most 64 products, which threads add up in float32.
__device__ __forceinline__ float with_cut_off(float dot) {
  constexpr float kCutOff = 5.5e-8f;
  return ::fmaf(dot, kCutOff, dot);
}

// Two operands in planes.
struct PlanePair {
  int low_rows, low_columns;  // where the low plane begins in a line of each operand
  LineScales row_scales, column_scales;

  // Multiplies the dot products of the planes by the scales, powers of two, so that no bit is lost.
  template <int kSize>
  __device__ __forceinline__ void scale(float (&dots)[kSize], int row0, int column0) const {
    const float of_row[2] = {row_scales[row0 + fragment_row(0)], row_scales[row0 + fragment_row(1)]};
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_column = column_scales[column0 + fragment_column(i + e)];
        dots[i + e] = with_cut_off(dots[i + e]) * of_row[0] * of_column;
        dots[i + e + 2] = with_cut_off(dots[i + e + 2]) * of_row[1] * of_column;
      }
    }
  }
};

}  // namespace monoidreduce
