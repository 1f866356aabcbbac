// Scores that a user's functions make of dot products, for the resident kernels: the functions of score_element.h, of
// ElementReal, in natural units.
#pragma once

#include <cmath>

#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/program/element_real.cuh"
#include "monoidreduce/device/program/score_element.h"
#include "monoidreduce/traits.h"

namespace monoidreduce {

template <class P>
struct ModifiedScores {
  using R = typename P::Real;
  static constexpr bool kOfSequences = P::kOfSequences;
  ModifiedScoresData data;

  MR_HD bool touches(int batch, int head, int row0, int row_count, int column0, int column_count) const {
    return data.kinds == nullptr ||
           data.kinds_of(batch, head, row0, row_count, column0, column_count).most != 0;
  }
  // Do all rows of a tile keep all columns, so that nobody need ask the mask.
  MR_HD bool whole(int batch, int head, int row0, int row_count, int column0, int column_count) const {
    return data.kinds != nullptr &&
           data.kinds_of(batch, head, row0, row_count, column0, column_count).least == 2;
  }
  MR_HD BlockStrip strip_of_rows(int batch, int head, int row0, int row_count) const {
    return data.strip_of_rows(batch, head, row0, row_count);
  }
  MR_HD BlockStrip strip_of_columns(int batch, int head, int column0, int column_count) const {
    return data.strip_of_columns(batch, head, column0, column_count);
  }
  // Of the element at (down, across) from one at (query, position), whose numbers as reals are given too.
  MR_HD ScoreElement<R> element(float dot, int batch, int head, int query, int down, int position, int across,
                                R real_query, R real_position, R real_distance) const {
    return {R(dot) * R(data.scale),
            batch,
            head,
            query + down,
            position + across,
            real_query + R(float(down)),
            real_position + R(float(across)),
            real_distance + R(float(across - down)),
            data.tables,
            data.size};
  }

  // A fragment holds scores in natural units. kKnown: does the kernel know of a tile whether it is whole. Then the mask has a
  // loop of its own, behind a branch. In kernels of sm80 that spilled 88 bytes for a function of four tensors, with both in one
  // loop 4; in those of Hopper, two copies of such a loop spilled 172 bytes, and this none (NVRTC 13.0).
  template <bool kKnown>
  struct OfHead {
    static constexpr bool kMonotone = true;
    const ModifiedScores& all;
    int batch, head;
    bool whole;
    float unit = float(kLog2E);

    template <int kSize>
    __device__ __forceinline__ void prepare(float (&tile)[kSize], int row0, int column0) const {
      const int rows[2] = {row0 + fragment_row(0), row0 + fragment_row(1)},
                first_column = column0 + fragment_column(0);
      const R real_rows[2] = {R(rows[0]), R(rows[1])}, real_column(first_column);
      const R distances[2] = {real_column - real_rows[0], real_column - real_rows[1]};
      const auto element = [&](int i) {
        const int r = row_of_element(i), column = i / 4 * 8 + i % 2;
        return all.element(tile[i], batch, head, rows[r], 0, first_column, column, real_rows[r], real_column,
                           distances[r]);
      };
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const auto e = element(i);
        tile[i] = P::score(e).x;
        if (P::kMasked && !kKnown && !P::keeps(e)) tile[i] = -INFINITY;
      }
      if constexpr (P::kMasked && kKnown) {
        if (whole) return;
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (!P::keeps(element(i))) tile[i] = -INFINITY;
        }
      }
    }
    __device__ __forceinline__ Bits value(Bits score, int) const { return score * Bits(unit); }
    __device__ __forceinline__ Bits rounded(Bits score) const { return __fmul_rn(score.x, unit); }
    __device__ __forceinline__ OfHead of_scores(bool held) const {
      OfHead policy = *this;
      if (held) policy.unit = 1.f;
      return policy;
    }
  };
  __device__ __forceinline__ OfHead<false> of_head(int batch, int head) const {
    return {*this, batch, head, false};
  }
  __device__ __forceinline__ OfHead<true> of_head(int batch, int head, bool whole) const {
    return {*this, batch, head, whole};
  }

  // Scores of a tile with absent ones among them, which finish_transposed clears.
  struct Pulled {
    const ModifiedScores& all;
    const int batch, head, first_row, column;
    const R real_row, real_column, distance;
    const bool whole;

    __device__ __forceinline__ ScoreElement<R> element(Bits dot, int i) const {
      const int row = i / 4 * 8 + i % 2, down = 8 * row_of_element(i);
      return all.element(dot.x, batch, head, first_row, row, column, down, real_row, real_column, distance);
    }
    template <int kSize>
    __device__ __forceinline__ void prepare_transposed(float (&)[kSize], int, int) const {}
    __device__ __forceinline__ Bits value(Bits dot, int i) const {
      return P::score(element(dot, i)).x * float(kLog2E);
    }
    __device__ __forceinline__ Bits unit() const { return Bits(all.data.scale); }
    // An absent score has g = 0, and its slope may not be finite.
    __device__ __forceinline__ Bits chain(Bits g, Bits dot, int i) const {
      return select(g == Bits(0), g, g * Bits(P::slope(element(dot, i)).x));
    }
    template <int kSize>
    __device__ __forceinline__ void finish_transposed(float (&weights)[kSize], float (&g)[kSize], int,
                                                      int) const {
      if constexpr (P::kMasked) {
        if (whole) return;
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (!P::keeps(element(Bits(0), i))) weights[i] = g[i] = 0.f;
        }
      }
    }
  };
  __device__ __forceinline__ Pulled pulled(int batch, int head, int row0, int column0,
                                           bool whole = false) const {
    const int first_row = row0 + fragment_column(0), column = column0 + fragment_row(0);
    return {*this, batch, head, first_row, column, R(first_row), R(column), R(column) - R(first_row), whole};
  }
};
template <class P>
inline constexpr bool kScoresOfElements<ModifiedScores<P>> = true;

}  // namespace monoidreduce
