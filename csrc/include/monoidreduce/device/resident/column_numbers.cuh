// The numbers that a user's program reads of a tile's columns, in shared memory of a consumer warpgroup.
#pragma once

#include "monoidreduce/device/arch/warpgroup.cuh"
#include "monoidreduce/device/program/statistics.h"

namespace monoidreduce::sm90 {

// kColumns: of a tile, at most as many as a warpgroup has threads. A consumer has two: it reads one while the next is written.
template <class P, int kColumns>
struct ColumnNumbers {
  typename P::Real data[P::kColumnData > 0 ? P::kColumnData : 1][kColumns];
  typename P::ColumnIndex index[P::kColumnIndices > 0 ? P::kColumnIndices : 1][kColumns];

  // Called by all threads of a consumer, which must meet before they read. Beyond the last column that column's
  // numbers are repeated.
  __device__ __forceinline__ void load(const ProgramData& from, int column0) {
    if constexpr (P::kColumnData + P::kColumnIndices > 0) {
      const int place = threadIdx.x % kWarpgroup;
      if (place >= kColumns) return;
      const std::int64_t column = ::min(column0 + place, static_cast<int>(from.columns) - 1);
      const auto* const numbers = static_cast<const float*>(from.column);
#pragma unroll
      for (int k = 0; k < P::kColumnData; ++k) data[k][place] = numbers[k * from.column_pitch + column];
#pragma unroll
      for (int k = 0; k < P::kColumnIndices; ++k)
        index[k][place] =
            saturated<typename P::ColumnIndex>(from.column_index[k * from.column_index_pitch + column]);
    }
  }
  // The element of a row in a column of the tile that begins at column0. Scores are scaled.
  __device__ __forceinline__ ProgramElement<P> element(typename P::Real score, typename P::Real other,
                                                       const ProgramRow<P>& row, int column, int column0,
                                                       const ProgramTables& tables) const {
    ProgramElement<P> e{score, other, column0 + column, row, {}, {}, tables};
#pragma unroll
    for (int k = 0; k < P::kColumnData; ++k) e.column[k] = data[k][column];
#pragma unroll
    for (int k = 0; k < P::kColumnIndices; ++k) e.column_index[k] = index[k][column];
    return e;
  }
};

}  // namespace monoidreduce::sm90
