// The weights of a payload as an epilogue of the contraction (contraction_sm{80,90}.cuh), for payloads too
// wide for the fused kernels: the hidden values of an MLP and their gradients. Tiles of dot products become
// weights. With a second product, u = <G_i, payload_j>, they also become derivatives with respect to the
// first dot product. Both are stored in the element type; the fold and its gradients are matrix products of
// the stored tiles.
#pragma once

#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/block/pull_fragment.cuh"

namespace monoidreduce {

// Stores: as in gradient_epilogue.cuh. Tensor 0 has the weights, tensor 1 the derivatives.
template <class E, TileMonoid M, FragmentScores<M> Scores, FragmentStores Stores>
  requires PulledScores<Scores, M>
struct PayloadEpilogue {
  static_assert(!M::kNormalized && std::is_empty_v<typename M::Frame>,
                "a weight must not depend on other columns");
  using Memory = typename Stores::Memory;
  static constexpr int kProducts = Stores::kOuts;
  struct Work {};
  M m;
  Scores scores;
  PartialSums sums;  // column sums of the derivatives
  Stores stores;

  __device__ __forceinline__ Work begin(int) const { return {}; }
  template <int kSize>
  __device__ __forceinline__ void tile(Work&, float (&dots)[kProducts][kSize], int row0, int column0,
                                       Memory& memory, int warpgroup) const {
    constexpr int kSlabs = kSize / kSlabElements;
    scores.prepare(dots[0], row0, column0);
    if constexpr (kProducts == 2) {
      pull_fragment(m, scores, [](int) { return RowResidual<M>{}; }, dots[0], dots[1]);
    } else {
      typename M::State states[2] = {m.identity(), m.identity()};
      weigh_fragment(m, states, dots[0], scores);
    }
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        float part[kSlabElements];
#pragma unroll
        for (int i = 0; i < kSlabElements; ++i) part[i] = dots[n][slab * kSlabElements + i];
        if (n == 1) sums.store(part, row0, column0 + slab * kSlab);
        if constexpr (std::is_same_v<E, float>) {
          stores.store_floats(part, n, row0, column0 + slab * kSlab, memory, warpgroup);
        } else {
          std::uint32_t words[kSlabElements / 2];
          round_fragment<E>(words, part);
          stores.template store<kSlabs * kProducts>(words, n, row0, column0 + slab * kSlab,
                                                    slab * kProducts + n, memory, warpgroup);
        }
      }
    }
  }
  __device__ __forceinline__ void end(const Work&, std::int64_t) const {}
  __device__ __forceinline__ void finish() const { stores.finish(); }
};

}  // namespace monoidreduce
