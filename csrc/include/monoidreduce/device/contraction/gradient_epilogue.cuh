// Local gradients (dlogits, dS) as an epilogue of the contraction (contraction_sm{80,90}.cuh). Each tile of
// dot products becomes a tile of derivatives with respect to them, D(P_i, X_ij) times the upstream gradient,
// stored in the element type. The gradients of rows and columns (dX, dW) are matrix products of the stored
// tiles.
#pragma once

#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/contraction/row_order.cuh"

namespace monoidreduce {

// Stores the gradients with respect to the first kOuts of an element's scores to kOuts tensors [rows,
// columns]. Stores: how a tile gets there (slab_stores_sm90.cuh, quad_stores_sm80.cuh).
template <class E, Monoid M, FragmentScores<M> Scores, LocalGradientRows<M> Rows, FragmentStores Stores>
  requires PulledScores<Scores, M>
struct GradientEpilogue {
  using R = typename M::Real;
  using Memory = typename Stores::Memory;
  static constexpr int kOuts = Stores::kOuts;
  struct Work {
    typename M::Output product[2];
    typename M::Upstream upstream[2];
    int label[2];
    R factor[2];
    bool far;
  };
  M m;
  Scores scores;
  Rows rows;
  RowOrder order;
  PartialSums sums;  // column sums of the first gradient
  Stores stores;

  __device__ __forceinline__ Work begin(int row0) const {
    Work work;
    bool far = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t row = order[::min(row0 + fragment_row(r), order.rows - 1)];
      work.product[r] = rows.product(row);
      work.upstream[r] = rows.upstream(row, scores.unit());
      work.label[r] = rows.label(row);
      work.factor[r] = factor_of<R>(rows, row);
      far |= rows.far(work.product[r]);
    }
    work.far = __any_sync(0xffffffffu, far);
    return work;
  }
  template <int kSize>
  __device__ __forceinline__ void tile(Work& work, float (&dots)[M::kScores][kSize], int row0, int column0,
                                       Memory& memory, int warpgroup) const {
    constexpr int kColumns = kSize * 2;
#pragma unroll
    for (int n = 0; n < M::kScores; ++n) scores.prepare(dots[n], row0, column0);
    const auto here = [&](int x) { return static_cast<unsigned>(x - column0) < kColumns; };
    const bool plain = !kReadsColumns<M> && !work.far &&
                       !__any_sync(0xffffffffu, here(work.label[0]) || here(work.label[1]));
#pragma unroll
    for (int slab = 0; slab < kColumns / kSlab; ++slab) {
#pragma unroll
      for (int n = 0; n < kOuts; ++n) {
        Slab pulled;
        if (plain) {
          pull_slab<true>(pulled, work, dots, n, slab, row0, column0);
        } else {
          pull_slab<false>(pulled, work, dots, n, slab, row0, column0);
        }
        if constexpr (kFloats) {
          stores.store_floats(pulled, n, row0, column0 + slab * kSlab, memory, warpgroup);
        } else {
          stores.template store<kColumns / kSlab * kOuts>(pulled, n, row0, column0 + slab * kSlab,
                                                          slab * kOuts + n, memory, warpgroup);
        }
      }
    }
  }
  __device__ __forceinline__ void end(const Work&, std::int64_t) const {}
  __device__ __forceinline__ void finish() const { stores.finish(); }

 private:
  static constexpr bool kFloats = std::is_same_v<E, float>;
  // A thread's elements of 64 columns: pairs of rounded ones, or floats.
  using Slab = std::conditional_t<kFloats, float[kSlabElements], std::uint32_t[kSlabElements / 2]>;

  // The gradients of 64 columns with respect to the n-th score. One score at a time: both together do not fit
  // the registers.
  template <bool kPlain, int kSize>
  __device__ __forceinline__ void pull_slab(Slab& pulled, const Work& work,
                                            const float (&dots)[M::kScores][kSize], int n, int slab, int row0,
                                            int column0) const {
    float gradients[kSlabElements];
#pragma unroll
    for (int i = 0; i < kSlabElements; ++i) {
      const int at = slab * kSlabElements + i, r = row_of_element(at);
      const auto score = [&](int which) {
        const R dot(dots[which][at]);
        return kPlain ? scores.value(dot, at) : scores.rounded(dot);
      };
      const Element<R> e{score(0), score(M::kScores - 1), kPlain ? 0 : column0 + fragment_column(at),
                         kPlain ? -1 : work.label[r], work.factor[r]};
      const Gradient<R> g = m.local_gradient(e, work.product[r], work.upstream[r]);
      gradients[i] = n == 0 ? scores.chain(g.score, e.score, i).x : scores.chain(g.other, e.other, i).x;
    }
    if constexpr (requires { scores.bias; }) {
      if (n == 0) sums.store(gradients, row0, column0 + slab * kSlab);
    }
    if constexpr (kFloats) {
#pragma unroll
      for (int i = 0; i < kSlabElements; ++i) pulled[i] = gradients[i];
    } else {
      round_fragment<E>(pulled, gradients);
    }
  }
};

}  // namespace monoidreduce
