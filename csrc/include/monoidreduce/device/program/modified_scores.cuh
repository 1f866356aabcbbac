// Scores that a user's functions make of dot products, for the resident kernels: the functions of score_element.h, of
// ScoreReal, in natural units.
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
  // What the kernels take: scores in bits, or weights (attend). And that of an element that a row does not keep.
  static constexpr float kUnit = P::kWeights ? 1.f : float(kLog2E);
  static constexpr float kAbsent = P::kWeights ? 0.f : -INFINITY;
  ModifiedScoresData data;

  MR_HD bool touches(int batch, int head, int row0, int row_count, int column0, int column_count) const {
    return data.blocks == nullptr || data.touches(batch, head, row0, row_count, column0, column_count);
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

  // In bits.
  MR_HD float unit_of_dots() const { return data.scale * float(kLog2E); }

  // A fragment holds scores in natural units, or dot products where functions leave scores as they are.
  // kWords: of bits that say which elements are kept. With 0 of them, the mask is asked beside the scores.
  // That is for kernels of sm80, which do not know of a tile whether it is whole. A loop of its own spilled
  // 88 bytes there for a function of four tensors, this one 4 (NVRTC 13.0).
  template <int kWords>
  struct OfHead {
    static constexpr bool kMonotone = true;
    const ModifiedScores& all;
    int batch, head;
    bool whole;
    float unit;  // of what the fragment holds
    Numbers<std::uint32_t, kWords> kept{};

    // The elements of a thread: element(i), of a dot product.
    struct Elements {
      const OfHead& of;
      int rows[2], first_column;
      R real_rows[2], real_column, distances[2];

      __device__ __forceinline__ Elements(const OfHead& of, int row0, int column0)
          : of(of),
            rows{row0 + fragment_row(0), row0 + fragment_row(1)},
            first_column(column0 + fragment_column(0)),
            real_rows{R(rows[0]), R(rows[1])},
            real_column(first_column),
            distances{real_column - real_rows[0], real_column - real_rows[1]} {}
      __device__ __forceinline__ ScoreElement<R> operator()(int i, float dot) const {
        const int r = row_of_element(i), column = i / 4 * 8 + i % 2;
        return of.all.element(dot, of.batch, of.head, rows[r], 0, first_column, column, real_rows[r],
                              real_column, distances[r]);
      }
    };
    template <int kSize>
    __device__ __forceinline__ void prepare(float (&tile)[kSize], int row0, int column0) const {
      if constexpr (!P::kPlain) {
        const Elements element(*this, row0, column0);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const auto e = element(i, tile[i]);
          tile[i] = P::score(e).x;
          if (P::kMasked && kWords == 0 && !P::keeps(e)) tile[i] = kAbsent;
        }
      }
      if constexpr (kWords > 0) mask(tile);
    }
    // While the tile is multiplied: a mask may load, and takes as long as the products.
    __device__ __forceinline__ void find_kept(int row0, int column0) {
      if (!P::kMasked || whole) return;
      const Elements element(*this, row0, column0);
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        kept[word] = 0;
#pragma unroll
        for (int n = 0; n < 32; ++n) kept[word] |= P::keeps(element(32 * word + n, 0.f)) ? 1u << n : 0u;
      }
    }
    template <int kSize>
    __device__ __forceinline__ void mask(float (&tile)[kSize]) const {
      static_assert(kSize == 32 * kWords);
      if (!P::kMasked || whole) return;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (!(kept[i / 32] >> i % 32 & 1)) tile[i] = kAbsent;
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
  __device__ __forceinline__ OfHead<0> of_head(int batch, int head) const {
    return {*this, batch, head, false, kUnit};
  }

  // The same of a tile, where scores go up from key to key by a step (P::kSteps). A fragment holds dot products plus the steps
  // from the thread's first column, in their unit: one multiply-add an element. What else a row's scores have is an offset, which
  // frames take instead. data.scale is positive.
  template <int kWords>
  struct SteppedTile {
    static constexpr bool kMonotone = true;
    OfHead<kWords> of_head;
    float unit, step[2], rest[2];  // rest: the scores of the thread's first column, for dot products of 0

    __device__ __forceinline__ SteppedTile(const OfHead<kWords>& of_head, int row0, int column0)
        : of_head(of_head), unit(of_head.all.unit_of_dots()) {
      const typename OfHead<kWords>::Elements element(of_head, row0, column0);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto first = element(2 * r, 0.f);
        step[r] = (P::step(first) / R(of_head.all.data.scale)).x, rest[r] = P::score(first).x * float(kLog2E);
      }
    }
    __device__ __forceinline__ bool is_finite(int r) const { return fabsf(rest[r]) < INFINITY; }
    template <int kSize>
    __device__ __forceinline__ void prepare(float (&tile)[kSize], int row0, int column0) const {
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        tile[i] = __fmaf_rn(float(i / 4 * 8 + i % 2), step[row_of_element(i)], tile[i]);
      if (!is_finite(0) || !is_finite(1)) {  // a frame cannot take these
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          tile[i] += is_finite(row_of_element(i)) ? 0.f : rest[row_of_element(i)];
      }
      of_head.mask(tile);
    }
    __device__ __forceinline__ Bits offset(int r) const { return is_finite(r) ? rest[r] : 0.f; }
    __device__ __forceinline__ Bits value(Bits x, int) const { return x * Bits(unit); }
    __device__ __forceinline__ Bits rounded(Bits x) const { return __fmul_rn(x.x, unit); }
    __device__ __forceinline__ SteppedTile of_scores(bool held) const {
      SteppedTile policy = *this;
      if (held) policy.unit = 1.f, policy.rest[0] = policy.rest[1] = 0.f;
      return policy;
    }
  };
  // Of a tile of kColumns whose lines begin with row0, and its columns with column0. Before its products are there.
  template <int kColumns>
  __device__ __forceinline__ auto of_tile(int batch, int head, int row0, int column0, bool whole) const {
    constexpr int kWords = kColumns / 2 / 32;
    OfHead<kWords> of_head{*this, batch, head, whole, P::kPlain ? unit_of_dots() : kUnit};
    of_head.find_kept(row0, column0);
    if constexpr (P::kSteps)
      return SteppedTile<kWords>(of_head, row0, column0);
    else
      return of_head;
  }

  // Scores of a tile with absent ones among them, which finish_transposed clears. kWords: as of OfHead.
  template <int kWords>
  struct Pulled {
    const ModifiedScores& all;
    const int batch, head, first_row, column;
    const R real_row, real_column, distance;
    const bool whole;
    Numbers<std::uint32_t, kWords> kept{};

    // While the tile is multiplied.
    __device__ __forceinline__ void find_kept() {
      if (!P::kMasked || whole) return;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        kept[word] = 0;
#pragma unroll
        for (int n = 0; n < 32; ++n) kept[word] |= P::keeps(element(Bits(0), 32 * word + n)) ? 1u << n : 0u;
      }
    }
    __device__ __forceinline__ bool keeps(int i) const {
      if constexpr (kWords > 0)
        return kept[i / 32] >> i % 32 & 1;
      else
        return P::keeps(element(Bits(0), i));
    }
    __device__ __forceinline__ ScoreElement<R> element(Bits dot, int i) const {
      const int row = i / 4 * 8 + i % 2, down = 8 * row_of_element(i);
      return all.element(dot.x, batch, head, first_row, row, column, down, real_row, real_column, distance);
    }
    template <int kSize>
    __device__ __forceinline__ void prepare_transposed(float (&)[kSize], int, int) const {}
    __device__ __forceinline__ Bits value(Bits dot, int i) const {
      if constexpr (P::kPlain)
        return dot * Bits(all.unit_of_dots());
      else
        return P::score(element(dot, i)).x * kUnit;
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
          if (!keeps(i)) weights[i] = g[i] = 0.f;
        }
      }
    }
  };
  // The same where P::kOfDistance: two multiply-adds an element. Elements of the same distance share the
  // inner one.
  template <int kWords>
  struct PulledByDistance : Pulled<kWords> {
    float units, step, rest;  // rest: the score of the thread's first element, for a dot product of 0

    __device__ __forceinline__ explicit PulledByDistance(const Pulled<kWords>& tile)
        : Pulled<kWords>(tile), units(tile.all.unit_of_dots()) {
      const auto first = tile.element(Bits(0), 0);
      step = P::step(first).x * float(kLog2E), rest = P::score(first).x * float(kLog2E);
    }
    __device__ __forceinline__ Bits value(Bits dot, int i) const {
      const int row = i / 4 * 8 + i % 2, down = 8 * row_of_element(i);
      return __fmaf_rn(dot.x, units, __fmaf_rn(float(down - row), step, rest));
    }
    __device__ __forceinline__ Bits chain(Bits g, Bits, int) const { return g; }
  };
  __device__ __forceinline__ Pulled<0> pulled(int batch, int head, int row0, int column0) const {
    return pulled<0>(batch, head, row0, column0, false);
  }
  // Of a tile of kRows, before its products are there; or of any where nobody asks the mask before, with 0.
  template <int kRows>
  __device__ __forceinline__ auto pulled_tile(int batch, int head, int row0, int column0, bool whole) const {
    constexpr int kWords = kRows / 2 / 32;
    Pulled<kWords> tile = pulled<kWords>(batch, head, row0, column0, whole);
    tile.find_kept();
    if constexpr (P::kOfDistance)
      return PulledByDistance<kWords>(tile);
    else
      return tile;
  }

 private:
  template <int kWords>
  __device__ __forceinline__ Pulled<kWords> pulled(int batch, int head, int row0, int column0,
                                                   bool whole) const {
    const int first_row = row0 + fragment_column(0), column = column0 + fragment_row(0);
    return {*this, batch, head, first_row, column, R(first_row), R(column), R(column) - R(first_row), whole};
  }
};
template <class P>
inline constexpr bool kScoresOfElements<ModifiedScores<P>> = true;

}  // namespace monoidreduce
