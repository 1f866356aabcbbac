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

// Epilogues of programs are loops over parts of a tile (gradients: over slabs), so that a program's code is there for the elements of
// a part alone. Unrolled over a tile, the code of linear_sample was 13,000 instructions, more than an SM's instruction
// cache holds: 8192 x 128256 x 4096 took 17 ms more than the products, on an H200.
//
// kPartOfTile: elements of each score that a thread takes at a time, of its kSize of a tile. Parts of half the size took 2 to 4 %
// longer. Parts of twice the size spilled on sm_80, where a thread holds four tiles of 32 elements (up to 680 bytes), and with two
// scores in long programs: 100 bytes with the 41 lines of Jensen and Shannon's divergence.
template <class P, int kSize>
inline constexpr int kPartOfTile = P::kScores == 1                 ? (kSize > 32 ? 16 : 8)
                                   : kSize > 32 && P::kLines <= 30 ? 8
                                                                   : 4;

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
  static constexpr bool kLoops = true;
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
    constexpr int kPart = kPartOfTile<P, kSize>, kParts = kSize / kPart,
                  kPartsAtOnce = kMostColumns / fragment_columns(kPart);
#pragma unroll 1
    for (int n = 0; n < kParts; ++n) {
      float part[P::kScores][kPart];
#pragma unroll
      for (int score = 0; score < P::kScores; ++score)
        take_elements<kPart, 0, kParts>(part[score], dots[score], n, 0);
      const int column = column0 + n * fragment_columns(kPart);
      if (column + fragment_columns(kPart) <= data.columns)
        fold_part<true>(work, part, column);
      else
        fold_part<false>(work, part, column);
      if ((n + 1) % kPartsAtOnce == 0 || n + 1 == kParts) work.most.settle(most);
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
  // Folds kPart elements of each score, from column0 on. kAll: all of their columns exist.
  template <bool kAll, int kPart>
  __device__ __forceinline__ void fold_part(Work& work, const float (&dots)[P::kScores][kPart],
                                            int column0) const {
    const auto element = [&](int i) { return fragment_element<P>(data, work.rows, dots, i, column0); };
    const auto present = [&](int i) { return kAll || column0 + fragment_column(i) < data.columns; };
    fold_elements<P, kPart, kAll>(work.state, row_of_element, element, present);
    if constexpr (P::kMost > 0) {
      float values[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) values[i] = scalar(P::most(element(i)));
      const auto column = [&](int i) { return data.first_column + column0 + fragment_column(i); };
      work.most.offer(most, values, row_of_element, column, present);
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
    constexpr int kValues =
                      P::kSoftmaxes + means<P>() + P::kTotals + P::kLargest + P::kCarried + P::kEntropies,
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
    // With parts of 8 the gradient of one of two scores, which has 192 sums of a thread, spilled 140 bytes.
    constexpr int kSlabs = kSize / Slab::kElements, kPart = P::kScores == 1 ? kPartOfTile<P, kSize> : 4;
    const Rows rows = [&] {
      if constexpr (kKeepsRows)
        return work;
      else
        return rows_at(row0);
    }();
    // As a loop over two slabs, gradients of both of two scores spilled 130 bytes.
#pragma unroll(kSlabs > 2 ? 1 : kSlabs)
    for (int slab = 0; slab < kSlabs; ++slab) {
      const int column = column0 + slab * fragment_columns(Slab::kElements);
      Slab slabs[kOuts];
#pragma unroll
      for (int first = 0; first < Slab::kElements; first += kPart) {
        float part[P::kScores][kPart];
#pragma unroll
        for (int n = 0; n < P::kScores; ++n)
          take_elements<Slab::kElements, 0, kSlabs>(part[n], dots[n], slab, first);
#pragma unroll
        for (int i = 0; i < kPart; i += 2) {
          const int column_of_part = column + fragment_columns(first);
          const auto even = gradient(rows, part, i, column_of_part),
                     odd = gradient(rows, part, i + 1, column_of_part);
          slabs[0].set(first + i, even.score, odd.score);
          if constexpr (kOuts == 2) slabs[1].set(first + i, even.other, odd.other);
        }
      }
#pragma unroll
      for (int n = 0; n < kOuts; ++n) {
        if constexpr (std::is_same_v<E, float>)
          stores.store_floats(slabs[n].numbers, n, row0, column, slab * kOuts + n, memory, warpgroup);
        else
          stores.template store<kSlabs * kOuts>(slabs[n].numbers, n, row0, column, slab * kOuts + n, memory,
                                                warpgroup);
      }
    }
  }
  __device__ __forceinline__ void end(const Work&, std::int64_t) const {}
  __device__ __forceinline__ void finish() const { stores.finish(); }

 private:
  // A thread's gradients of a slab: floats, or words of two. A slab has 32 columns of floats, or 64.
  struct Slab {
    static constexpr bool kFloats = std::is_same_v<E, float>;
    static constexpr int kElements = kFloats ? kSlabElements / 2 : kSlabElements;
    std::conditional_t<kFloats, float, std::uint32_t> numbers[kSlabElements / 2];
    __device__ __forceinline__ void set(int i, float even, float odd) {
      if constexpr (kFloats)
        numbers[i] = even, numbers[i + 1] = odd;
      else
        numbers[i / 2] = arch::pack<E>(even, odd);
    }
  };
  __device__ __forceinline__ Rows rows_at(int row0) const {
    Rows rows;
    load_rows<P>(rows.at, data, row0);
    return rows;
  }
  template <int kPart>
  __device__ __forceinline__ Gradient<float> gradient(const Rows& rows,
                                                      const float (&dots)[P::kScores][kPart], int i,
                                                      int column0) const {
    const auto g = P::gradient(fragment_element<P>(data, rows.at, dots, i, column0));
    const float scale = static_cast<float>(data.scale);
    return {scalar(g.score) * scale, scalar(g.other) * scale};
  }
};

}  // namespace monoidreduce
