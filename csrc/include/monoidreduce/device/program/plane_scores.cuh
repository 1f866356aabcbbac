// The score policy of attention whose scores are modified by a user's functions (score_mod, mask_mod), for float32
// operands in planes (block/planes_sm90.cuh). Scores are in natural units. The scaled dot product and the functions'
// products are rounded by themselves: both passes have the same scores, to the last bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "monoidreduce/device/block/fast_real.cuh"
#include "monoidreduce/device/program/modified_scores.cuh"

namespace monoidreduce {

// P::Real is ElementReal (element_real.cuh): scores of planes have the accuracy of float, and its functions keep it.
template <class P>
struct PlaneScores : ScoresOfCall<P> {
  using R = typename P::Real;
  using RowTables = RowTableGradient<P>;
  static constexpr float kAbsent = P::kWeights ? 0.f : -INFINITY;  // a masked element
  using ScoresOfCall<P>::data;

  // The elements that a thread has of a tile that begins at (row0, column0), 32 of them. kTransposed: the fragment's
  // lines are columns.
  template <bool kTransposed>
  struct Elements {
    static constexpr bool kDropsWeights = kDrops<P>;
    const PlaneScores& all;
    const int batch, head, first_row, first_column;
    const R real_row, real_column, distance;
    std::uint32_t kept = ~0u;  // bit i: mask_mod keeps element i

    __device__ __forceinline__ Elements(const PlaneScores& all, int batch, int head, int row0, int column0)
        : all(all),
          batch(batch),
          head(head),
          first_row(row0 + (kTransposed ? fragment_column(0) : fragment_row(0))),
          first_column(column0 + (kTransposed ? fragment_row(0) : fragment_column(0))),
          real_row(first_row),
          real_column(first_column),
          distance(real_column - real_row) {}
    // Element i, with its dot product.
    __device__ __forceinline__ ScoreElement<R> element(float dot, int i) const {
      const int of_line = 8 * row_of_element(i), in_line = i / 4 * 8 + i % 2;
      return all.element(product(R(dot), R(all.data.scale)), batch, head, first_row,
                         kTransposed ? in_line : of_line, first_column, kTransposed ? of_line : in_line,
                         real_row, real_column, distance);
    }
    // A function may turn NaN into a number. Then the score is NaN if the dot product is not finite: planes give NaN for some
    // infinities of float32. A NaN marks the row, which is computed again (repair.cuh).
    __device__ __forceinline__ float score(float dot, int i) const {
      const float x = P::score(element(dot, i)).x;
      return P::kHidesNan ? fmaf(0.f, dot, x) : x;
    }
    // Evaluates the mask, unless the block mask says that the tile is whole.
    __device__ __forceinline__ void find_kept(bool whole) {
      if (!P::kMasked || whole) return;
      kept = 0;
#pragma unroll
      for (int i = 0; i < 32; ++i) kept |= P::keeps(element(0.f, i)) ? 1u << i : 0u;
    }
    __device__ __forceinline__ bool sees(int i) const { return !P::kMasked || counts(i); }
    // Takes in the mask of a band or of spans, which counts() then knows too.
    __device__ __forceinline__ void restrict_to(const Kept (&band)[2]) {
#pragma unroll
      for (int i = 0; i < 32; ++i) kept &= band[row_of_element(i)](i) ? ~0u : ~(1u << i);
    }
    __device__ __forceinline__ bool counts(int i) const { return kept >> i & 1; }
    __device__ __forceinline__ bool drops(int i) const { return P::drops(element(0.f, i)); }
    __device__ __forceinline__ float kept_factor() const { return all.kept_factor(); }
  };

  // Forward: prepare() turns dot products into scores.
  struct Folded : Elements<false> {
    static constexpr bool kMonotone = false;
    using Elements<false>::Elements;
    template <int kSize>
    __device__ __forceinline__ void prepare(float (&tile)[kSize], int, int) const {
      static_assert(kSize == 32);
#pragma unroll
      for (int i = 0; i < kSize; ++i) tile[i] = this->sees(i) ? this->score(tile[i], i) : kAbsent;
    }
    __device__ __forceinline__ Full value(Full score, int) const { return score; }
    __device__ __forceinline__ Full rounded(Full score) const { return score; }
    template <int kSize>
    __device__ __forceinline__ void drop(float (&weights)[kSize], int, int) const {
#pragma unroll
      for (int i = 0; i < kSize; ++i) weights[i] = this->drops(i) ? 0.f : weights[i];
    }
  };
  __device__ __forceinline__ Folded folded(int batch, int head, int row0, int column0) const {
    return {*this, batch, head, row0, column0};
  }

  // Backward: the fragment keeps dot products. Masked elements are cleared at the end. kSumsTables: the gradient of
  // tables that are gathered from by key is summed, if it is wanted; for transposed fragments.
  template <bool kTransposed, bool kSumsTables>
  struct Pulled : Elements<kTransposed> {
    static constexpr bool kHasTableGradient = kSumsTables && kTransposed && gathers<P>(false);
    using Elements<kTransposed>::Elements;
    template <int kSize>
    __device__ __forceinline__ void prepare(float (&)[kSize], int, int) const {}
    template <int kSize>
    __device__ __forceinline__ void prepare_transposed(float (&)[kSize], int, int) const {}
    __device__ __forceinline__ Full value(Full dot, int i) const { return this->score(dot.x, i); }
    __device__ __forceinline__ Full unit() const { return this->all.data.scale; }
    // A masked score has g = 0, but its slope may not be finite.
    __device__ __forceinline__ Full chain(Full g, Full dot, int i) const {
      Full slope = P::slope(this->element(dot.x, i)).x;
      // The g of a softmax has its weight as a factor, which is NaN already.
      if constexpr (P::kHidesNan && P::kWeights) slope = slope + Full(0) * dot;
      return select(g == Full(0), g, g * slope);
    }
    template <int kSize>
    __device__ __forceinline__ void finish_transposed(float (&weights)[kSize], float (&g)[kSize], int,
                                                      int) const {
      static_assert(kSize == 32);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (!this->sees(i)) weights[i] = g[i] = 0.f;
      }
      // The last tile may have more rows than there are queries. Their dot products are 0, and attend's weight of 0 may be
      // infinite, which would make the gradient of v NaN. Their g is 0 already.
      if constexpr (P::kWeights && kTransposed) {
        const int rows = this->all.data.rows - this->first_row;  // from the thread's first one on
        if (rows < 2 * kSize) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            if (i / 4 * 8 + i % 2 >= rows) weights[i] = 0.f;
          }
        }
      }
    }
    // For pull_fragment, as TableGradient says. rows, kept: as there.
    template <int kSize>
    __device__ __forceinline__ auto table_gradient(const float (&dots)[kSize], int rows,
                                                   const Kept (&kept)[2]) const {
      return FragmentTableGradient<P, Pulled, kSize>{*this, dots, 1.f / this->all.data.scale,
                                                     rows - this->first_row, kept};
    }
  };
  template <bool kTransposed, bool kSumsTables>
  __device__ __forceinline__ Pulled<kTransposed, kSumsTables> pulled(int batch, int head, int row0,
                                                                     int column0) const {
    return {*this, batch, head, row0, column0};
  }
};

template <class Scores>
inline constexpr bool kOfPrograms = false;
template <class P>
inline constexpr bool kOfPrograms<PlaneScores<P>> = true;
// Whether scores gather from tables by row, and the gradient of these is wanted.
template <class Scores>
inline constexpr bool kSumsRowTables = false;
template <class P>
inline constexpr bool kSumsRowTables<PlaneScores<P>> = gathers<P>(true);

}  // namespace monoidreduce
