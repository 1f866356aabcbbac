// The one matrix product of the CPU engine, on panels: c[m][lane] (+)= sum_k a(m, k) b[k][lane], lane in [0, kPanel).
//
// b and c are contiguous panels, a is read one scalar at a time at any stride and broadcast. Every product of a fold has this
// form with rows (or widths) as lanes, so that nothing is transposed between them (cpu/fold.h lists the six).
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/cpu/pack.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

// Element (m, k) of the broadcast operand; k runs through segments of length, whose starts are segment apart.
template <class T>
struct Broadcast {
  const T* data;
  std::int64_t row_stride;
  std::int64_t column_stride;
  std::int64_t segment = 0;
};

// kRows rows of c stay in registers for the whole sum.
template <int kRows, class T>
inline void matmul_block(Broadcast<T> a, std::int64_t segments, std::int64_t length, const T* b, T* c, bool accumulate) {
  using R = LanePack<T>;
  R sum[kRows][kPacks];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    for (int p = 0; p < kPacks; ++p) sum[m][p] = accumulate ? R::load(c + m * kPanel<T> + p * kLanes<T>) : R(0);
  }
  for (std::int64_t s = 0; s < segments; ++s) {
    const T* from = a.data + s * a.segment;
    for (std::int64_t k = 0; k < length; ++k, b += kPanel<T>, from += a.column_stride) {
      R lanes[kPacks];
      for (int p = 0; p < kPacks; ++p) lanes[p] = R::load(b + p * kLanes<T>);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const R scalar(from[m * a.row_stride]);
        for (int p = 0; p < kPacks; ++p) sum[m][p] = sum[m][p] + scalar * lanes[p];
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    for (int p = 0; p < kPacks; ++p) sum[m][p].store(c + m * kPanel<T> + p * kLanes<T>);
  }
}

template <int kRows, class T>
inline void matmul_rows(Broadcast<T> a, std::int64_t rows, std::int64_t segments, std::int64_t length, const T* b, T* c,
                        bool accumulate) {
  std::int64_t m = 0;
  for (; m + kRows <= rows; m += kRows) {
    matmul_block<kRows>({a.data + m * a.row_stride, a.row_stride, a.column_stride, a.segment}, segments, length, b,
                        c + m * kPanel<T>, accumulate);
  }
  if constexpr (kRows > 1) {
    const Broadcast<T> rest{a.data + m * a.row_stride, a.row_stride, a.column_stride, a.segment};
    matmul_rows<kRows / 2>(rest, rows - m, segments, length, b, c + m * kPanel<T>, accumulate);
  }
}

// c[rows][kPanel] (+)= a[rows][segments * length] b[segments * length][kPanel].
template <class T>
inline void matmul(Broadcast<T> a, std::int64_t rows, std::int64_t segments, std::int64_t length, const T* b, T* c,
                   bool accumulate) {
  // Two accumulators a row, two registers of b and a broadcast scalar must fit the register file.
  constexpr int kRows = kVectorRegisters == 32 ? 12 : 6;
  if (segments > 1) {
    matmul_rows<kRows>(a, rows, segments, length, b, c, accumulate);
    return;
  }
  // b's panel is read once for every kRows rows: keep it in the first-level cache (32 KiB).
  constexpr std::int64_t kDepth = 32 * 1024 / (kPanel<T> * sizeof(T));
  for (std::int64_t k = 0; k < length || k == 0; k += kDepth) {
    const Broadcast<T> from{a.data + k * a.column_stride, a.row_stride, a.column_stride, 0};
    matmul_rows<kRows>(from, rows, 1, std::min(kDepth, length - k), b + k * kPanel<T>, c, accumulate || k > 0);
  }
}

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
