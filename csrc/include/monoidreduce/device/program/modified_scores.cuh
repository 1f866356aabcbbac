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
  MR_HD ScoreElement<R> element(float dot, int batch, int head, int query, int position, R real_query,
                                R real_position) const {
    return {R(dot) * R(data.scale), batch,       head,     query, position, real_query,
            real_position,          data.tables, data.size};
  }
  // In units of log 2.
  __device__ __forceinline__ static float bits(const ScoreElement<R>& e) {
    if constexpr (P::kMasked) {
      if (!P::keeps(e)) return -INFINITY;
    }
    return P::score(e).x * float(kLog2E);
  }

  struct OfHead {
    static constexpr bool kMonotone = false;
    const ModifiedScores& all;
    int batch, head;

    template <int kSize>
    __device__ __forceinline__ void prepare(float (&tile)[kSize], int row0, int column0) const {
      const int rows[2] = {row0 + fragment_row(0), row0 + fragment_row(1)},
                first_column = column0 + fragment_column(0);
      const R real_rows[2] = {R(rows[0]), R(rows[1])}, real_column(first_column);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int r = row_of_element(i), column = i / 4 * 8 + i % 2;
        tile[i] = bits(all.element(tile[i], batch, head, rows[r], first_column + column, real_rows[r],
                                   real_column + R(float(column))));
      }
    }
    __device__ __forceinline__ Bits value(Bits score, int) const { return score; }
    __device__ __forceinline__ Bits rounded(Bits score) const { return score; }
  };
  __device__ __forceinline__ OfHead of_head(int batch, int head) const { return {*this, batch, head}; }

  struct Pulled {
    const ModifiedScores& all;
    const int batch, head, first_row, column;
    const R real_row, real_column;

    __device__ __forceinline__ ScoreElement<R> element(Bits dot, int i) const {
      const int row = i / 4 * 8 + i % 2, down = 8 * row_of_element(i);
      return all.element(dot.x, batch, head, first_row + row, column + down, real_row + R(float(row)),
                         real_column + R(float(down)));
    }
    template <int kSize>
    __device__ __forceinline__ void prepare_transposed(float (&)[kSize], int, int) const {}
    __device__ __forceinline__ Bits value(Bits dot, int i) const { return bits(element(dot, i)); }
    __device__ __forceinline__ Bits unit() const { return Bits(all.data.scale); }
    // An absent score has g = 0, and its slope may not be finite.
    __device__ __forceinline__ Bits chain(Bits g, Bits dot, int i) const {
      return select(g == Bits(0), g, g * Bits(P::slope(element(dot, i)).x));
    }
    template <int kSize>
    __device__ __forceinline__ void finish_transposed(float (&weights)[kSize], float (&g)[kSize], int,
                                                      int) const {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (weights[i] == 0.f) g[i] = 0.f;  // the payload of an absent element may not be finite
      }
    }
  };
  __device__ __forceinline__ Pulled pulled(int batch, int head, int row0, int column0) const {
    const int first_row = row0 + fragment_column(0), column = column0 + fragment_row(0);
    return {*this, batch, head, first_row, column, R(first_row), R(column)};
  }
};
template <class P>
inline constexpr bool kScoresOfElements<ModifiedScores<P>> = true;

}  // namespace monoidreduce
