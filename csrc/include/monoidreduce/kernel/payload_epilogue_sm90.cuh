// The weights of a payload as an epilogue of the contraction (contraction_sm90.cuh), for payloads too wide to ride along:
// tiles of dot products become weights and, where a second product is u = <G_i, payload_j>, derivatives by the first one
// too. They are stored in the element type; the fold and its gradients are products of what is stored.
#pragma once

#include "monoidreduce/block/fold_fragment.cuh"
#include "monoidreduce/block/pull_fragment.cuh"
#include "monoidreduce/kernel/contraction_sm90.cuh"
#include "monoidreduce/kernel/slab_stores_sm90.cuh"

namespace monoidreduce::sm90 {

template <class E, PayloadMonoid M, class Scores, int kProducts>
struct PayloadEpilogue {
  static_assert(!M::kNormalized && std::is_empty_v<typename M::Frame>,
                "a weight must not depend on other columns");
  using Memory = SlabMemory;
  struct Work {};
  M m;
  Scores scores;
  PartialSums sums;                 // of the derivatives
  arch::TensorMap outs[kProducts];  // weights, derivatives: [rows, columns]

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
      weigh_fragment<false>(m, states, dots[0], scores);
    }
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        float part[kSlabElements];
#pragma unroll
        for (int i = 0; i < kSlabElements; ++i) part[i] = dots[n][slab * kSlabElements + i];
        if (n == 1) sums.store(part, row0, column0 + slab * kSlab);
        std::uint32_t words[kSlabElements / 2];
        round_fragment<E>(words, part);
        store_slab<kSlabs * kProducts>(words, outs[n], row0, column0 + slab * kSlab, slab * kProducts + n,
                                       memory, warpgroup);
      }
    }
  }
  __device__ __forceinline__ void end(const Work&, std::int64_t) const {}
  __device__ __forceinline__ void finish() const { arch::wait_stores_read<0>(); }
};

// The weights of all elements and, of a problem with a second product, the derivatives by the first one. outs: [1, 1, rows,
// columns] each, of the element type. sums: of the derivatives over 16 rows each, [rows / 16, columns] of whole tiles;
// or absent.
template <class E, class Tile, PayloadMonoid M, class Scores>
void payload_weights(const M& m, const Scores& scores, const FoldProblem& p,
                     const TensorView (&outs)[Tile::kScores], const TensorView& sums, const Launch& launch) {
  PayloadEpilogue<E, M, Scores, Tile::kScores> epilogue{
      m, scores, {static_cast<float*>(sums.data), sums.stride[0], static_cast<int>(p.rows())}, {}};
  for (int n = 0; n < Tile::kScores; ++n) epilogue.outs[n] = tensor_map(outs[n], kSlabBoxRows);
  contraction<E, Tile>(contraction_arguments<Tile>(p), epilogue, "payload_weights_sm90", p.a.cuda_device,
                       launch);
}

}  // namespace monoidreduce::sm90
