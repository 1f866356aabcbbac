// The bias of attention's scores, without shared memory: each thread reads the numbers for its own scores of a tile
// from global memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/device/block/matrix.cuh"
#include "monoidreduce/traits.h"

namespace monoidreduce {

// Reads the bias of a thread's scores, of element type B. A bool bias adds 0, or -inf where it masks the score.
// The tile begins at row0 and column0 of the matrix. Where a tile reaches beyond the last row or column, the
// nearest element is read instead: such scores have weights of 0, whatever their bias is.
template <class B, bool kTransposed>
struct BiasesInMemory {
  using Stored = std::conditional_t<std::is_same_v<B, bool>, std::uint8_t, B>;
  const Matrix<float, kTransposed> matrix;
  const int row0, column0;

  // Strides of 32 bits take fewer registers. Calls with larger ones have other kernels (csrc/plan).
  __device__ __forceinline__ Stored load(int i) const {
    const int row = ::min(row0 + fragment_row(row_of_element(i)), static_cast<int>(matrix.rows()) - 1);
    const int column = ::min(column0 + fragment_column(i), static_cast<int>(matrix.width()) - 1);
    const std::int64_t down = std::int64_t{row} * static_cast<int>(matrix.row_stride()),
                       across = std::int64_t{column} * static_cast<int>(matrix.stride());
    return *reinterpret_cast<const Stored*>(matrix.data + down + across);
  }
  __device__ __forceinline__ static float addend(Stored x) {
    if constexpr (std::is_same_v<B, bool>) return x ? 0.f : -INFINITY;
    return x;
  }
  __device__ __forceinline__ float operator[](int i) const { return addend(load(i)); }
  __device__ __forceinline__ float2 pair(int i) const { return {(*this)[i], (*this)[i + 1]}; }
};

// The same in registers.
template <class B, int kSize>
struct BiasesInRegisters {
  using InMemory = BiasesInMemory<B, false>;
  typename InMemory::Stored stored[kSize];

  template <bool kTransposed>
  __device__ __forceinline__ explicit BiasesInRegisters(const BiasesInMemory<B, kTransposed>& from) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) stored[i] = from.load(i);
  }
  __device__ __forceinline__ float operator[](int i) const { return InMemory::addend(stored[i]); }
  __device__ __forceinline__ float2 pair(int i) const { return {(*this)[i], (*this)[i + 1]}; }
};

// The scores of TileBiasedScores, with biases in global memory, whose rows and columns are less than 2^31
// bytes apart. rows_share and owns_d_bias say how scores share d_bias.
template <class R, class B, Softcap kSoftcap>
struct MemoryBiasedScores {
  Tensor bias;  // [batch, heads, rows, columns]
  TileBiasedScores<R, B, kSoftcap> with_biases;

  // The biases of the kSize elements of a thread. line0, first: the fragment's first line, and the first
  // element of its lines. kTransposed: lines are columns. kAhead: reads them at once.
  template <bool kTransposed, int kSize, bool kAhead>
  __device__ __forceinline__ auto biases(int batch, int head, int line0, int first) const {
    const BiasesInMemory<B, kTransposed> there{Matrix<float, kTransposed>(bias, batch, head), line0, first};
    if constexpr (kAhead)
      return BiasesInRegisters<B, kSize>(there);
    else
      return there;
  }
};

template <class Scores>
inline constexpr bool kBiasedInMemory = false;
template <class R, class B, Softcap kSoftcap>
inline constexpr bool kBiasedInMemory<MemoryBiasedScores<R, B, kSoftcap>> = true;
// Whether the biases may have a gradient.
template <class Scores>
inline constexpr bool kHasBiasGradient = false;
template <class R, Softcap kSoftcap>
inline constexpr bool kHasBiasGradient<MemoryBiasedScores<R, float, kSoftcap>> = true;

// The scores of one fragment with its biases, if there are any. Forward reads these at once, so that they
// arrive while the tile's products are computed. Backward does so if kAhead, else where it
// uses them: a bool bias in finish_transposed, others in value.
template <int kSize, class Scores>
__device__ __forceinline__ decltype(auto) folded_with_biases(const Scores& scores, int batch, int head,
                                                             int row0, int column0) {
  if constexpr (kBiasedInMemory<Scores>)
    return scores.with_biases.folded(scores.template biases<false, kSize, true>(batch, head, row0, column0));
  else
    return (scores);
}
template <bool kTransposed, int kSize, bool kAhead, class Scores>
__device__ __forceinline__ decltype(auto) pulled_with_biases(const Scores& scores, int batch, int head,
                                                             int line0, int first) {
  if constexpr (kBiasedInMemory<Scores>)
    return scores.with_biases.pulled(
        scores.template biases<kTransposed, kSize, kAhead>(batch, head, line0, first));
  else
    return (scores);
}

}  // namespace monoidreduce
