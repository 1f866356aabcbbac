// The gradient of tables (program/table_gradient.cuh) in the tensor-core kernels.
#pragma once

#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/program/table_gradient.cuh"
#include "monoidreduce/device/warp/lanes.cuh"

namespace monoidreduce {

// Sums the gradients of table entries that are gathered by key, over a transposed fragment: its lines are keys.
// pull_fragment (pull_fragment.cuh) calls it as `see`, once for each element, while dots[i] is still the dot product of
// element i. Scores: ModifiedScores::Pulled, or PlaneScores::Pulled.
template <class P, class Scores, int kSize>
struct FragmentTableGradient {
  static constexpr int kGathers = P::kGathers;
  const Scores& scores;
  const float (&dots)[kSize];
  const float factor;  // from derivatives with respect to dot products to those with respect to scores
  const int rows;      // number of rows from the thread's first one on
  const Kept (&kept)[2];
  float of_columns[kGathers][2] = {};  // for each gather: sums over the tile, of the thread's two columns
  EntrySum<float> of_elements[kGathers];

  __device__ __forceinline__ void operator()(int i, float g) {
    const bool counts = kept[row_of_element(i)](i) && i / 4 * 8 + i % 2 < rows && scores.sees(i);
    add<0>(i, scores.element(dots[i], i), counts ? g * factor : 0.f);
  }
  __device__ __forceinline__ void finish() const { add_sums<0>(); }

 private:
  __device__ __forceinline__ auto entries() const {
    return TableEntries<P::kTableSum, float>(scores.all.data);
  }
  template <int n, class Element>
  __device__ __forceinline__ void add(int i, const Element& e, float g) {
    if constexpr (n < kGathers) {
      // An element that does not count may have an infinite slope.
      const float gradient = g == 0.f ? 0.f : g * P::template by_gathered<n>(e).x;
      if constexpr (P::kEntryOf[n] == EntryOf::kElement)
        of_elements[n].add(entries(), P::template entry<n>(e), gradient);
      else if constexpr (P::kEntryOf[n] == EntryOf::kColumn)
        of_columns[n][row_of_element(i)] += gradient;
      add<n + 1>(i, e, g);
    }
  }
  template <int n>
  __device__ __forceinline__ void add_sums() const {
    if constexpr (n < kGathers) {
      if constexpr (P::kEntryOf[n] == EntryOf::kElement) {
        of_elements[n].finish(entries());
      } else if constexpr (P::kEntryOf[n] == EntryOf::kColumn) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float sum = reduce_lanes<kLanesOfRow>(of_columns[n][r], AddNumbers{});
          const auto of_column = scores.element(0.f, 2 * r);
          if (threadIdx.x % kLanesOfRow == 0) entries().add(P::template entry<n>(of_column), sum);
        }
      }
      add_sums<n + 1>();
    }
  }
};

// Sums the gradients of table entries that are gathered by query, not by key. The fragment's lines are queries, and the
// sums of each run over many tiles of keys.
template <class P>
struct RowTableGradient {
  float of_rows[kGathers<P> > 0 ? kGathers<P> : 1][2] = {};  // for each gather: of the thread's two rows

  // e: element i. g: the derivative with respect to its score.
  template <int n = 0, class Element>
  __device__ __forceinline__ void add(int i, const Element& e, float g) {
    if constexpr (n < kGathers<P>) {
      if constexpr (P::kEntryOf[n] == EntryOf::kRow)
        of_rows[n][row_of_element(i)] += g == 0.f ? 0.f : g * P::template by_gathered<n>(e).x;
      add<n + 1>(i, e, g);
    }
  }
  // Adds factor times the sums to the entries. scores: those of any tile of the rows. Called by all lanes of a warp.
  template <int n = 0, class Scores>
  __device__ __forceinline__ void finish(const Scores& scores, float factor) const {
    if constexpr (n < kGathers<P>) {
      if constexpr (P::kEntryOf[n] == EntryOf::kRow) {
        const TableEntries<P::kTableSum, float> entries(scores.all.data);
        EntrySum<float> of_warp;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float sum = reduce_lanes<kLanesOfRow>(of_rows[n][r], AddNumbers{}) * factor;
          const auto of_row = scores.element(0.f, 2 * r);
          // Derivatives of rows beyond the last one may be NaN.
          const bool adds = threadIdx.x % kLanesOfRow == 0 && of_row.query < scores.all.data.rows;
          of_warp.add(entries, P::template entry<n>(of_row), adds ? sum : 0.f);
        }
        of_warp.finish(entries);
      }
      finish<n + 1>(scores, factor);
    }
  }
};

}  // namespace monoidreduce
