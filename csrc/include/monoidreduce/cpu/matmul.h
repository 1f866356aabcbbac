// The one matrix product of the CPU engine, on panels:
//
//   c[m][lane] (+)= sum_k a(m, k) b[k][lane]      for lane in [0, kPanel)
//
// b and c are contiguous panels; a is read one scalar (or pair) at a time and broadcast. Every product of a fold has this form,
// with lanes that are rows or elements of the width, so no operand is transposed in between. cpu/fold.h lists the products.
//
// Operands have the accumulation type T, or BFloat16 if the processor multiplies pairs of these (AVX512-BF16: twice the rate of
// float32). Sums have type T in both cases. kDepth<E> operands are multiplied at a time. So a panel of operands is
// [k / kDepth][lane][kDepth], zero beyond the last k.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "monoidreduce/cpu/pack.h"
#include "monoidreduce/cpu/tiles.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

template <class E>
inline constexpr int kDepth = sizeof(E) == 2 ? 2 : 1;

// The broadcast operand, a. The kDepth elements (m, k), (m, k + 1), ... are adjacent, at
//
//   data[m * row_stride + k / kDepth * step]
//
// k runs through segments of equal length; the starts of two successive segments are `segment` apart.
template <class E>
struct Broadcast {
  const E* data;
  std::int64_t row_stride;
  std::int64_t step;
  std::int64_t segment = 0;
};

// One step of a product: loads lanes of b, broadcasts a scalar of a, and computes sum + scalar * lanes.
template <class T, class E>
struct Step;

template <class T>
struct Step<T, T> {
  using Lanes = LanePack<T>;
  MR_HD static Lanes lanes(const T* b, int pack) { return Lanes::load(b + pack * kLanes<T>); }
  MR_HD static Lanes scalar(const T* a) { return Lanes(*a); }
  MR_HD static LanePack<T> add(LanePack<T> sum, Lanes scalar, Lanes lanes) { return sum + scalar * lanes; }
};

#ifdef __AVX512BF16__
inline constexpr bool kMultipliesBFloat16 = true;
template <>
struct Step<float, BFloat16> {
  using Lanes = __m512i;
  MR_HD static Lanes lanes(const BFloat16* b, int pack) {
    return _mm512_loadu_si512(b + pack * 2 * kLanes<float>);
  }
  MR_HD static Lanes scalar(const BFloat16* a) {
    std::int32_t pair;
    std::memcpy(&pair, a, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  MR_HD static LanePack<float> add(LanePack<float> sum, Lanes scalar, Lanes lanes) {
    return LanePack<float>(LanePack<float>::Vector(_mm512_dpbf16_ps(
        __m512(sum.v), reinterpret_cast<__m512bh>(scalar), reinterpret_cast<__m512bh>(lanes))));
  }
};
#else
inline constexpr bool kMultipliesBFloat16 = false;
#endif

// Computes kRows rows of c, which stay in registers for the whole sum. The sum starts from 0 and is added to c at the end,
// because a sum of tiles' sums is more accurate than one long sum.
template <int kRows, class T, class E>
inline void matmul_block(Broadcast<E> a, std::int64_t segments, std::int64_t length, const E* b, T* c,
                         bool accumulate) {
  using R = LanePack<T>;
  R sum[kRows][kPacks];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    for (int p = 0; p < kPacks; ++p) sum[m][p] = R(0);
  }
  // c may not be in the cache, and is needed once the sum is complete.
  for (int m = 0; accumulate && m < kRows; ++m) {
    for (int p = 0; p < kPacks; ++p) __builtin_prefetch(c + m * kPanel<T> + p * kLanes<T>, 1);
  }
  for (std::int64_t s = 0; s < segments; ++s) {
    const E* from = a.data + s * a.segment;
    for (std::int64_t k = 0; k < length; k += kDepth<E>) {
      typename Step<T, E>::Lanes lanes[kPacks];
      for (int p = 0; p < kPacks; ++p) lanes[p] = Step<T, E>::lanes(b, p);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const auto scalar = Step<T, E>::scalar(from + m * a.row_stride);
        for (int p = 0; p < kPacks; ++p) sum[m][p] = Step<T, E>::add(sum[m][p], scalar, lanes[p]);
      }
      b += kPanel<T> * kDepth<E>;
      from += a.step;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    for (int p = 0; p < kPacks; ++p) {
      T* to = c + m * kPanel<T> + p * kLanes<T>;
      (accumulate ? R::load(to) + sum[m][p] : sum[m][p]).store(to);
    }
  }
}

// Computes rows of c in blocks of kRows, and the remaining rows in blocks of 8, 4, 2 and 1: most widths are multiples of 4 or
// 8.
template <int kRows, class T, class E>
inline void matmul_rows(Broadcast<E> a, std::int64_t rows, std::int64_t segments, std::int64_t length,
                        const E* b, T* c, bool accumulate) {
  std::int64_t m = 0;
  for (; m + kRows <= rows; m += kRows) {
    matmul_block<kRows>({a.data + m * a.row_stride, a.row_stride, a.step, a.segment}, segments, length, b,
                        c + m * kPanel<T>, accumulate);
  }
  if constexpr (kRows > 1) {
    const Broadcast<E> rest{a.data + m * a.row_stride, a.row_stride, a.step, a.segment};
    constexpr int kNext = static_cast<int>(std::bit_floor(unsigned(kRows - 1)));
    matmul_rows<kNext>(rest, rows - m, segments, length, b, c + m * kPanel<T>, accumulate);
  }
}

// The most terms that are summed in one run; the runs' sums are then added up. For float, runs of 64 cost 1 to 2 % of
// attention's time. Runs of 128 have 1.1 to 1.2 times the error; runs of 32 have 0.8 times the error, but cost 8 %. (A run of b
// is read once for every kRows rows, from the L1 cache: 8 KiB of float, 16 KiB of BFloat16.)
template <class T, class E>
inline constexpr std::int64_t kRun = std::is_same_v<T, E> ? 64 : 256;

// c[rows][kPanel] (+)= a[rows][segments * length] b[segments * length][kPanel].
template <class T, class E>
inline void matmul(Broadcast<E> a, std::int64_t rows, std::int64_t segments, std::int64_t length, const E* b,
                   T* c, bool accumulate, std::int64_t longest = kRun<T, E>) {
  // Two accumulators per row, two registers of b and a broadcast scalar must fit into the vector registers.
  constexpr int kRows = kVectorRegisters == 32 ? 12 : 6;
  if (segments > 1) {
    const std::int64_t run = std::max<std::int64_t>(longest / length, 1);
    for (std::int64_t s = 0; s < segments; s += run) {
      matmul_rows<kRows>({a.data + s * a.segment, a.row_stride, a.step, a.segment}, rows,
                         std::min(run, segments - s), length, b + s * length * kPanel<T>, c,
                         accumulate || s > 0);
    }
    return;
  }
  for (std::int64_t k = 0; k < length || k == 0; k += longest) {
    const Broadcast<E> from{a.data + k / kDepth<E> * a.step, a.row_stride, a.step, 0};
    matmul_rows<kRows>(from, rows, 1, std::min(longest, length - k), b + k * kPanel<T>, c,
                       accumulate || k > 0);
  }
}

// Interleaves kDepth rows of `count` elements each, as an operand of a product: to[k][d] = rows[d][k].
template <class T>
inline void interleave(const T* const (&rows)[1], std::int64_t count, T* to) {
  std::copy_n(rows[0], count, to);
}
inline void interleave(const BFloat16* const (&rows)[2], std::int64_t count, BFloat16* to) {
  const auto *even = &rows[0]->bits, *odd = &rows[1]->bits;
  for (std::int64_t k = 0; k < count; ++k) {
    const std::uint32_t pair = even[k] | std::uint32_t(odd[k]) << 16;
    std::memcpy(to + 2 * k, &pair, sizeof(pair));
  }
}

// A panel of results as the operand b of the next product, [k / kDepth][lane][kDepth]. For T it is the panel itself. For
// BFloat16 it is rounded into `storage`, which has room for `count` rows, rounded up to a multiple of kDepth.
template <class T>
inline const T* as_operand(const T* panel, std::int64_t, T*) {
  return panel;
}
#ifdef __AVX512BF16__
inline const BFloat16* as_operand(const float* panel, std::int64_t count, BFloat16* storage) {
  using Halves [[gnu::vector_size(32)]] = std::uint16_t;
  using Words [[gnu::vector_size(64)]] = std::uint32_t;
  const auto rounded = [](const float* lanes) {
    return __builtin_convertvector(reinterpret_cast<Halves>(_mm512_cvtneps_pbh(_mm512_loadu_ps(lanes))),
                                   Words);
  };
  for (std::int64_t k = 0; k < count; k += 2) {
    for (int p = 0; p < kPacks; ++p) {
      const float* even = panel + k * kPanel<float> + p * kLanes<float>;
      Words pair = rounded(even);
      if (k + 1 < count) pair |= rounded(even + kPanel<float>) << 16;
      std::memcpy(storage + (k * kPacks / 2 + p) * 2 * kLanes<float>, &pair, sizeof(pair));
    }
  }
  return storage;
}
#endif

// A panel of results, rounded to the type of a broadcast operand (a) of a product that sums over lanes: [k][lane].
template <class T>
inline void narrow_rows(const T* panel, std::int64_t count, T* to) {
  std::copy_n(panel, count * kPanel<T>, to);
}
#ifdef __AVX512BF16__
inline void narrow_rows(const float* panel, std::int64_t count, BFloat16* to) {
  static_assert(kPacks == 2);
  for (std::int64_t k = 0; k < count; ++k, panel += kPanel<float>, to += kPanel<float>) {
    const __m512bh row = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(panel + kLanes<float>), _mm512_loadu_ps(panel));
    std::memcpy(to, &row, sizeof(row));
  }
}
#endif

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
