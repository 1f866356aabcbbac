// From dot products to the elements of a tile, for SIMT kernels: which elements are valid, and their scores.
// All in the element view (tile.cuh).
//
// A kernel's score policy defines a score; scores_of_head() specialises it for a head. Score<T> (score.h) is
// one policy, ProgramScores (device/simt/modified_simt.cuh) another.
#pragma once

#include "monoidreduce/device/block/tile.cuh"
#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/score.h"

namespace monoidreduce {

// The scores of a head by score.h, with an optional bias, which is read as numbers of type B.
template <class T, class B = T>
struct BiasedScoresOfHead {
  const Score<T>& score;
  Matrix<B> bias;

  // One element. value(dot) is its score; chain(g, dot) turns a derivative with respect to the score into one
  // with respect to the argument of the softcap.
  struct At {
    const Score<T>& score;
    T bias;
    __device__ T value(T dot) const { return score.value(dot, bias); }
    __device__ T chain(T g, T dot) const { return g * score.slope(dot, bias); }
  };
  __device__ At at(std::int64_t row, std::int64_t column) const {
    return {score, T(score_bias(bias, row, column))};
  }
  // touches: whether the tile at (row0, column0) holds any score. masks: whether elements may be masked.
  // keeps: whether this element is kept.
  __device__ bool touches(std::int64_t, std::int64_t) const { return true; }
  __device__ bool masks() const { return bias.tensor.dtype == DType::kBool; }
  __device__ bool keeps(std::int64_t row, std::int64_t column) const { return *bias.at(row, column) != 0; }
};
template <class T>
__device__ __forceinline__ BiasedScoresOfHead<T> scores_of_head(const Score<T>& score, const Tensor& bias,
                                                                std::int64_t batch, std::int64_t head) {
  return {score, Matrix<T>(bias, batch, head)};
}

// The valid elements of a tile, those that are not masked. The others are skipped: no monoid sees them, and
// nothing is multiplied by what their columns hold.
struct Validity {
  unsigned bits;   // bit n: the calling thread's element n is valid
  bool any, full;  // any or all elements of the tile are; the same in the whole block

  __device__ bool operator[](int n) const { return bits >> n & 1; }
};

// The validity of the tile at (row0, column0) of a [rows, columns] problem. active: whether the calling
// thread's row takes part. Also fills memory.valid if the tile is not full. Starts with a barrier;
// memory.valid may be read after the next one.
template <class T, class Scores>
__device__ __forceinline__ Validity find_valid(TileMemory<T>& memory, const ColumnRange& range,
                                               const Scores& scores, bool active, std::int64_t columns,
                                               std::int64_t row0, std::int64_t column0) {
  const std::int64_t row = row0 + element_row();
  const auto in_tile = [column0](std::int64_t column) {
    const std::int64_t c = column - column0;
    return static_cast<int>(c < 0 ? 0 : c < kTile ? c : kTile);
  };
  const int begin = active ? in_tile(range.begin(row)) : 0,
            end = active ? in_tile(range.end(row, columns)) : 0;
  unsigned bits = 0;
#pragma unroll
  for (int n = 0; n < kLaneElements; ++n) {
    const int c = element_column(n);
    bits |= unsigned{begin <= c && c < end} << n;
  }
  if (scores.masks()) {
#pragma unroll 1
    for (int n = 0; n < kLaneElements; ++n) {
      if ((bits >> n & 1) && !scores.keeps(row, column0 + element_column(n))) bits &= ~(1u << n);
    }
  }
  Validity valid{bits, true, true};
  valid.full = __syncthreads_and(bits == (1u << kLaneElements) - 1);
  if (!valid.full) {
    std::uint64_t of_row = 0;
#pragma unroll
    for (int n = 0; n < kLaneElements; ++n) of_row |= std::uint64_t{valid[n]} << element_column(n);
    of_row = reduce_lanes<kRowLanes>(of_row, [](std::uint64_t a, std::uint64_t b) { return a | b; });
    if (threadIdx.x % kRowLanes == 0) memory.valid[element_row()] = of_row;
    valid.any = __syncthreads_or(bits != 0);
  }
  return valid;
}

}  // namespace monoidreduce
