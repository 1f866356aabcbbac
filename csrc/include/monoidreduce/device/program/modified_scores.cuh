// The score policy of attention whose scores are modified by a user's functions (score_mod, mask_mod), for
// the resident kernels. The functions are described in score_element.h; their real type is ScoreReal, in
// natural units.
#pragma once

#include <cmath>

#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/fragment_table_gradient.cuh"
#include "monoidreduce/device/program/element_real.cuh"
#include "monoidreduce/device/program/score_element.h"
#include "monoidreduce/traits.h"

namespace monoidreduce {

// The scores of a call, and the blocks of its block mask.
template <class P>
struct ScoresOfCall {
  using R = typename P::Real;
  static constexpr bool kOfSequences = P::kOfSequences, kDropsWeights = kDrops<P>;
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
  // The element `down` rows and `across` columns from (query, position), whose indices are also given as
  // reals. Both indices are without bit 3, as the first row and column of a thread's fragment are.
  // score: the scaled dot product.
  MR_HD ScoreElement<R> element(R score, int batch, int head, int query, int down, int position, int across,
                                R real_query, R real_position, R real_distance) const {
    return {score,
            batch,
            head,
            query + down,
            position + across,
            real_query + R(float(down)),
            real_position + R(float(across)),
            real_distance + R(float(across - down)),
            data.tables,
            data.size,
            {query + (down & ~8), (down & 8) != 0},
            {position + (across & ~8), (across & 8) != 0}};
  }

  __device__ __forceinline__ float kept_factor() const {
    return P::kept_factor(element(R(0), 0, 0, 0, 0, 0, 0, R(0), R(0), R(0))).x;
  }
};

template <class P>
struct ModifiedScores : ScoresOfCall<P> {
  using R = typename P::Real;
  using ScoresOfCall<P>::data;
  // What the kernels take as scores: base-2 scores, or weights (attend); and the value of a masked element.
  static constexpr float kUnit = P::kWeights ? 1.f : float(kLog2E);
  static constexpr float kAbsent = P::kWeights ? 0.f : -INFINITY;

  // The factor from dot products to base-2 scores.
  MR_HD float unit_of_dots() const { return data.scale * float(kLog2E); }
  MR_HD R scaled(float dot) const { return R(dot) * R(data.scale); }

  // A fragment holds scores in natural units, or dot products if the functions leave scores as they are.
  // kWords: how many words of bits say which elements are kept. If it is 0, the mask is evaluated together
  // with the scores. That is for kernels of sm80, which do not know whether a tile is whole: a separate loop
  // spilled 88 bytes there for a function of four tensors, this one 4 (NVRTC 13.0).
  template <int kWords>
  struct OfHead {
    static constexpr bool kMonotone = true, kDropsWeights = kDrops<P>;
    const ModifiedScores& all;
    int batch, head;
    bool whole;
    float unit;  // what the fragment's numbers are multiplied by
    Numbers<std::uint32_t, kWords> kept{};

    // The elements of a thread: element(i, dot) is element i, with its dot product.
    struct Elements {
      const OfHead& of;
      int first_row, first_column;
      R real_row, real_column, distance;

      __device__ __forceinline__ Elements(const OfHead& of, int row0, int column0)
          : of(of),
            first_row(row0 + fragment_row(0)),
            first_column(column0 + fragment_column(0)),
            real_row(first_row),
            real_column(first_column),
            distance(real_column - real_row) {}
      __device__ __forceinline__ ScoreElement<R> operator()(int i, float dot) const {
        const int down = 8 * row_of_element(i), across = i / 4 * 8 + i % 2;
        return of.all.element(of.all.scaled(dot), of.batch, of.head, first_row, down, first_column, across,
                              real_row, real_column, distance);
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
    template <int kSize>
    __device__ __forceinline__ void drop(float (&weights)[kSize], int row0, int column0) const {
      const Elements element(*this, row0, column0);
#pragma unroll
      for (int i = 0; i < kSize; ++i) weights[i] = P::drops(element(i, 0.f)) ? 0.f : weights[i];
    }
    // Evaluates the mask while the tile is being multiplied: it may load from memory, and takes as long as
    // the products.
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

  // The policy of a tile whose scores go up by the same step from key to key (P::kSteps), as those of ALiBi
  // do. The fragment holds dot products plus the steps from the thread's first column, in their unit: one
  // multiply-add per element. The rest of a row's scores is an offset (OffsetScores), which is subtracted
  // from the frame instead. data.scale is positive.
  template <int kWords>
  struct SteppedTile {
    static constexpr bool kMonotone = true, kDropsWeights = kDrops<P>;
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
      if (!is_finite(0) || !is_finite(1)) {  // these cannot be an offset of the frame
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          tile[i] += is_finite(row_of_element(i)) ? 0.f : rest[row_of_element(i)];
      }
      of_head.mask(tile);
    }
    template <int kSize>
    __device__ __forceinline__ void drop(float (&weights)[kSize], int row0, int column0) const {
      of_head.drop(weights, row0, column0);
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
  // The policy of a tile of kColumns columns that starts at (row0, column0). Called before the tile's
  // products are there.
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

  // Backward: scores of a tile, including masked ones, which finish_transposed clears. kWords: as in OfHead.
  template <int kWords>
  struct Pulled {
    static constexpr bool kDropsWeights = kDrops<P>, kHasTableGradient = kGathers<P> > 0;
    const ModifiedScores& all;
    const int batch, head, first_row, column;
    const R real_row, real_column, distance;
    const bool whole;
    Numbers<std::uint32_t, kWords> kept{};

    // Evaluates the mask while the tile is being multiplied.
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
    // Whether mask_mod keeps element i.
    __device__ __forceinline__ bool sees(int i) const { return !P::kMasked || whole || keeps(i); }
    // For pull_fragment, as TableGradient says. rows, kept: as there.
    template <int kSize>
    __device__ __forceinline__ auto table_gradient(const float (&dots)[kSize], int rows,
                                                   const Kept (&kept)[2]) const {
      return FragmentTableGradient<P, Pulled, kSize>{*this, dots, 1.f / all.data.scale, rows - first_row,
                                                     kept};
    }
    __device__ __forceinline__ ScoreElement<R> element(Bits dot, int i) const {
      const int row = i / 4 * 8 + i % 2, down = 8 * row_of_element(i);
      return all.element(all.scaled(dot.x), batch, head, first_row, row, column, down, real_row, real_column,
                         distance);
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
    __device__ __forceinline__ bool drops(int i) const { return P::drops(element(Bits(0), i)); }
    __device__ __forceinline__ float kept_factor() const { return all.kept_factor(); }
    // A masked score has g = 0, but its slope may not be finite.
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
  // The same if P::kOfDistance: two multiply-adds per element. Elements of the same distance share the inner
  // one.
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
  // The policy of a tile of kRows rows, called before its products are there. With kRows = 0, of any tile:
  // the mask is not evaluated in advance.
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
