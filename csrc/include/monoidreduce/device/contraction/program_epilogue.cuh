// A user's program (device/program/statistics.h) as epilogues of the contraction: its fold, and its local
// gradients. The layout of these structs does not depend on the program: the host fills them without knowing
// it (csrc/cuda/program_passes.cuh).
#pragma once

#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/contraction/most.cuh"
#include "monoidreduce/device/program/element_real.cuh"
#include "monoidreduce/device/program/statistics.h"
#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/traits.h"

namespace monoidreduce {

// Element i of a thread's fragment whose lines are rows.
template <class P, int kScores, int kSize>
__device__ __forceinline__ ProgramElement<P> fragment_element(const ProgramData& data,
                                                              const ProgramRow<P> (&rows)[2],
                                                              const float (&dots)[kScores][kSize], int i,
                                                              int column0) {
  static_assert(kScores >= P::kScores);
  // The score is rounded by itself, so that both passes see the same one: a multiply-add that only adds -0 is
  // not fused with its use.
  const auto score = [&](int n) {
    return typename P::Real(fmaf(dots[n][i], static_cast<float>(data.scale), -0.f));
  };
  return data.element<P>(score(0), score(P::kScores - 1), rows[row_of_element(i)],
                         column0 + fragment_column(i));
}
template <class P>
__device__ __forceinline__ void load_rows(ProgramRow<P> (&rows)[2], const ProgramData& data, int row0) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    rows[r] = data.of_row<P>(::min(row0 + fragment_row(r), static_cast<int>(data.rows) - 1));
}

// partial: as in FoldEpilogue; combine_partial combines it.
template <class P>
struct ProgramFold {
  struct Memory {};
  struct Work {
    StatisticsState<P> state[2];
    ProgramRow<P> rows[2];
    MostOfRows<P::kMost> most;
  };
  ProgramData data;
  StatisticsState<P>* partial;
  MostMemory most;

  __device__ __forceinline__ Work begin(int row0) const {
    Work work;
    work.state[0] = work.state[1] = StatisticsSum<P>{}.identity();
    load_rows<P>(work.rows, data, row0);
    work.most.begin(most, row0);
    return work;
  }
  template <int kSize>
  __device__ __forceinline__ void tile(Work& work, const float (&dots)[P::kScores][kSize], int, int column0,
                                       Memory&, int) const {
    // The tile's own totals are added to the totals of all tiles once per tile. When each part of a tile was
    // added there, a total of 1300 terms was 1.9e-4 off 607, and the tests' tolerance is 1.8e-4.
    const Numbers<typename P::Real, P::kTotals> before[2] = {work.state[0].sums.total,
                                                             work.state[1].sums.total};
#pragma unroll
    for (auto& state : work.state) state.sums.total = StatisticsSums<P>::none().total;
    // Folds a few elements at a time: what both loops of fold_elements need of them must fit the registers.
    constexpr int kPart = P::kScores == 1 ? 16 : 8;
    // The last tile of a row, which may have columns that do not exist, is a loop if there is one score: unrolled,
    // it is a third of the kernel's code, and takes 14 to 44 % of the compiler's time. With two scores the loop
    // spilled 432 bytes on sm_80 (NVRTC 13.0; KL both ways and chi2).
    constexpr bool kLoops = P::kScores == 1;
#pragma unroll
    for (int first = 0; first < kSize; first += kPart) {
      int end = column0 + kSize * 2;
      // One branch for each part: if the compiler knew that all are the same, it would mix the parts, and a hinge
      // loss spilled 76 bytes.
      if constexpr (kLoops) asm volatile("" : "+r"(end));
      if (end <= data.columns) {
        fold_part<kPart, true>(work, dots, first, column0);
      } else if constexpr (!kLoops) {
        fold_part<kPart, false>(work, dots, first, column0);
      }
    }
    if (kLoops && column0 + kSize * 2 > data.columns) {
      float last[P::kScores][kSize];  // in local memory, as its index is not a constant
#pragma unroll
      for (int n = 0; n < P::kScores; ++n) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) last[n][i] = dots[n][i];
      }
#pragma unroll 1
      for (int first = 0; first < kSize; first += kPart) fold_part<kPart, false>(work, last, first, column0);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int k = 0; k < P::kTotals; ++k)
        work.state[r].sums.total[k] = before[r][k] + work.state[r].sums.total[k];
    }
  }
  __device__ __forceinline__ void end(Work& work, std::int64_t place) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto whole = reduce_lanes<4>(
          work.state[r], [](const auto& s, const auto& t) { return StatisticsSum<P>{}.combine(s, t); });
      if (threadIdx.x % 4 == 0) partial[place + fragment_row(r)] = whole;
    }
    work.most.end(most);
  }
  __device__ __forceinline__ void finish() const {}

 private:
  // Folds kPart elements of a thread, from element `first` on. kAll: none is beyond the last column.
  template <int kPart, bool kAll, int kSize>
  __device__ __forceinline__ void fold_part(Work& work, const float (&dots)[P::kScores][kSize], int first,
                                            int column0) const {
    const auto element = [&](int i) {
      return fragment_element<P>(data, work.rows, dots, first + i, column0);
    };
    const auto present = [&](int i) { return column0 + fragment_column(first + i) < data.columns; };
    fold_elements<P, kPart, kAll>(work.state, row_of_element, element, present);
    if constexpr (P::kMost > 0) {
      float values[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) values[i] = scalar(P::most(element(i)));
      const auto column = [&](int i) { return data.first_column + column0 + fragment_column(first + i); };
      work.most.offer(most, values, row_of_element, column, present);
      constexpr int kAtOnce = kMostColumns / 2;
      if ((first + kPart) % kAtOnce == 0 || first + kPart == kSize) work.most.settle(most, most.slack);
    }
  }
};

// The rows policy of combine_partial (StateRows).
template <class P>
struct ProgramRows {
  StatisticsResults results;
  const RankedElement* best;  // MostMemory::best
  __device__ __forceinline__ std::int64_t label(std::int64_t) const { return -1; }
  __device__ __forceinline__ void store(std::int64_t row, const StatisticsState<P>& state) const {
    results.store<P>(row, state);
    if constexpr (P::kMost > 0) store_most(row);
  }
  __device__ __forceinline__ void skip(std::int64_t row) const { store(row, StatisticsSum<P>{}.identity()); }

 private:
  // They are behind all other values and indices.
  __device__ __forceinline__ void store_most(std::int64_t row) const {
    constexpr int kValues = P::kSoftmaxes + means<P>() + P::kTotals + P::kLargest + P::kEntropies,
                  kIndices = P::kLargest + P::kCounts;
    for (int n = 0; n < P::kMost; ++n) {
      const RankedElement x = best[row * kMostKept + n];
      static_cast<float*>(results.values)[(kValues + n) * results.rows + row] =
          x == 0 ? -INFINITY : value_of(x);
      results.indices[(kIndices + n) * results.rows + row] = x == 0 ? -1 : column_of(x);
    }
  }
};

// The derivatives with respect to the scores, P::gradient(element), rounded to E (float: not rounded). kOuts tensors [rows,
// columns]: one for each score, or only the first one's, whose kernel computes nothing more.
template <class E, class P, class Tile, int kOuts>
struct ProgramGradient {
  static_assert(kOuts <= P::kScores);
  using Stores = typename Tile::template Stores<kOuts>;
  using Memory = typename Stores::Memory;
  // Whether the rows' data stay in registers while products run; otherwise they are read again for each tile.
  // With three divergences, a thread of sm_80, which has rows of two fragments, spilled 68 bytes with kept
  // data and spills 52 without. On sm_90 it is the other way round: 40 bytes with kept data, 96 without.
  static constexpr bool kKeepsRows = Tile::kFragments == 1;
  struct Rows {
    ProgramRow<P> at[2];
  };
  struct Nothing {};
  using Work = std::conditional_t<kKeepsRows, Rows, Nothing>;
  ProgramData data;
  Stores stores;

  __device__ __forceinline__ Work begin(int row0) const {
    if constexpr (kKeepsRows)
      return rows_at(row0);
    else
      return {};
  }
  template <int kSize>
  __device__ __forceinline__ void tile(const Work& work, const float (&dots)[P::kScores][kSize], int row0,
                                       int column0, Memory& memory, int warpgroup) const {
    constexpr int kSlabs = kSize / kSlabElements;
    const Rows rows = [&] {
      if constexpr (kKeepsRows)
        return work;
      else
        return rows_at(row0);
    }();
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      if constexpr (std::is_same_v<E, float>) {
        static_assert(kOuts == 1);
        float pulled[kSlabElements];
#pragma unroll
        for (int i = 0; i < kSlabElements; ++i)
          pulled[i] = gradient(rows, dots, slab * kSlabElements + i, column0).score;
        stores.store_floats(pulled, 0, row0, column0 + slab * kSlab, memory, warpgroup);
      } else {
        store_rounded(rows, dots, slab, row0, column0, memory, warpgroup);
      }
    }
  }
  __device__ __forceinline__ void end(const Work&, std::int64_t) const {}
  __device__ __forceinline__ void finish() const { stores.finish(); }

 private:
  template <int kSize>
  __device__ __forceinline__ void store_rounded(const Rows& rows, const float (&dots)[P::kScores][kSize],
                                                int slab, int row0, int column0, Memory& memory,
                                                int warpgroup) const {
    constexpr int kSlabs = kSize / kSlabElements;
    std::uint32_t words[kOuts][kSlabElements / 2];
#pragma unroll
    for (int i = 0; i < kSlabElements / 2; ++i) {
      const auto first = gradient(rows, dots, slab * kSlabElements + 2 * i, column0),
                 second = gradient(rows, dots, slab * kSlabElements + 2 * i + 1, column0);
      words[0][i] = arch::pack<E>(first.score, second.score);
      if constexpr (kOuts == 2) words[1][i] = arch::pack<E>(first.other, second.other);
    }
#pragma unroll
    for (int n = 0; n < kOuts; ++n)
      stores.template store<kSlabs * kOuts>(words[n], n, row0, column0 + slab * kSlab, slab * kOuts + n,
                                            memory, warpgroup);
  }
  __device__ __forceinline__ Rows rows_at(int row0) const {
    Rows rows;
    load_rows<P>(rows.at, data, row0);
    return rows;
  }
  template <int kSize>
  __device__ __forceinline__ Gradient<float> gradient(const Rows& rows,
                                                      const float (&dots)[P::kScores][kSize], int i,
                                                      int column0) const {
    const auto g = P::gradient(fragment_element<P>(data, rows.at, dots, i, column0));
    const float scale = static_cast<float>(data.scale);
    return {scalar(g.score) * scale, scalar(g.other) * scale};
  }
};

}  // namespace monoidreduce
