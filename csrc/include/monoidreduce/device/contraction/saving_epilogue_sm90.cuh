// The fold (fold_epilogue.cuh), which also saves the weight of each element, exp(score - frame), so that
// backward need not recompute the scores. The frame of a weight is the row max when its tile was folded. Once
// the row's results P_i (the log-sum-exp) are known, the saved weights become local gradients (dlogits) in
// place (weights_to_gradients.cuh).
#pragma once

#include <cuda_fp16.h>

#include "monoidreduce/device/contraction/contraction_sm90.cuh"
#include "monoidreduce/device/contraction/fold_epilogue.cuh"
#include "monoidreduce/monoids/logsumexp.h"

namespace monoidreduce::sm90 {

// The saved weights of the first `columns` columns, and the frames in which they are measured, in base 2: one
// array of each for every score. Rows are in the order in which they are computed (row_order.cuh).
//
// Weights of 16-bit operands are saved in float16, which has three more bits of precision than bfloat16. They are
// scaled to at most 2^15, for the score that is the frame. Below a row's largest weights, the range goes down by
// a factor of 2^-40. Weights of float32 operands are saved in float32.
template <int kScores_, int kTileColumns_, class Weight_ = __half>
struct KeptWeights {
  static constexpr int kScores = kScores_, kTileColumns = kTileColumns_;
  using Weight = Weight_;
  static constexpr float kBitsAboveFrame = sizeof(Weight) == 2 ? 15 : 0;
  Weight* weights[kScores];  // [rows, columns], lines of `pitch` elements
  float* frames[kScores];    // [rows, tiles]
  std::int64_t pitch = 0;
  int columns = 0;

  __host__ __device__ int tiles() const { return (columns + kTileColumns - 1) / kTileColumns; }
  // The weights of the rows from `row` on.
  KeptWeights from(std::int64_t row) const {
    KeptWeights part = *this;
    for (int n = 0; n < kScores; ++n) part.weights[n] += row * pitch, part.frames[n] += row * tiles();
    return part;
  }
};

// M: a monoid over Bits that weighs each score (at the row's temperature) as a LogSumExp does. The frame of
// its second score is frame.q.
template <MonotoneMonoid M, FragmentScores<M> Scores, StateRows<M> Rows, class Kept>
struct SavingEpilogue {
  static_assert(Kept::kScores == M::kScores);
  using R = typename M::Real;
  using Memory = SlabMemory;
  using Work = typename FoldEpilogue<M, Scores, Rows>::Work;
  FoldEpilogue<M, Scores, Rows> fold;
  Kept kept;
  SlabStores<M::kScores> stores;  // for the weights

  __device__ __forceinline__ Work begin(int row0) const { return fold.begin(row0); }

  template <int kSize>
  __device__ __forceinline__ void tile(Work& work, float (&dots)[M::kScores][kSize], int row0, int column0,
                                       Memory& memory, int warpgroup) const {
    constexpr int kSlabs = kSize * 2 / kSlab;
    typename FoldEpilogue<M, Scores, Rows>::Memory none;
    fold.tile(work, dots, row0, column0, none, warpgroup);
    if (column0 >= kept.columns) return;
    R frames[M::kScores][2];
#pragma unroll
    for (int n = 0; n < M::kScores; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const R frame = LogSumExp<R>::origin(frame_of(fold.m.frame_of(work.state[r]), n));
        frames[n][r] = frame - R(Kept::kBitsAboveFrame);
        const int place = row0 + fragment_row(r);
        if (threadIdx.x % kLanesOfRow == 0 && place < fold.order.rows)
          kept.frames[n][std::int64_t{place} * kept.tiles() + column0 / Kept::kTileColumns] = frames[n][r].x;
      }
    }
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
      for (int n = 0; n < M::kScores; ++n) {
        float weights[kSlabElements];
#pragma unroll
        for (int i = 0; i < kSlabElements; ++i) {
          // Rounded, because the frame is, and for large scores the fold rounds them too.
          const int r = row_of_element(i);
          const R rounded = fold.scores.rounded(R(dots[n][slab * kSlabElements + i]));
          weights[i] = exp(weighed(rounded, work.factor[r]) - frames[n][r]).x;
        }
        if constexpr (std::is_same_v<typename Kept::Weight, float>) {
          stores.store_floats(weights, n, row0, column0 + slab * kSlab, memory, warpgroup);
        } else {
          std::uint32_t words[kSlabElements / 2];
          round_fragment<__half>(words, weights);
          stores.template store<kSlabs * M::kScores>(words, n, row0, column0 + slab * kSlab,
                                                     slab * M::kScores + n, memory, warpgroup);
        }
      }
    }
  }
  __device__ __forceinline__ void end(const Work& work, std::int64_t place) const { fold.end(work, place); }
  __device__ __forceinline__ void finish() const { stores.finish(); }

 private:
  // The score at its row's temperature, if the monoid has temperatures.
  __device__ __forceinline__ static R weighed(R score, R factor) {
    if constexpr (requires(Element<R> e) { M::Rule::tempered(e); })
      return M::Rule::tempered({score, R(0), 0, -1, factor}).score;
    else
      return score;
  }
  template <class Frame>
  __device__ __forceinline__ static R frame_of(const Frame& frame, int score) {
    if constexpr (M::kScores == 1) {
      return frame;
    } else {
      return score == 0 ? frame.p : frame.q;
    }
  }
};

}  // namespace monoidreduce::sm90
