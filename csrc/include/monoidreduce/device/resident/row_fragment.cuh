// The forward pass of the 64 rows of a warpgroup's fragment: folds a tile of scores into them, and stores
// their result.
#pragma once

#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/resident/unmasked.cuh"

namespace monoidreduce {

// [batch, heads, rows, width] of the payload's element type. The width is a multiple of 8; rows are
// contiguous.
struct OutputRows {
  void* data;
  void* low;  // what rounding to `data` lost, in the same layout; or null
  std::int64_t stride[3];
  int width;
};

// With a block mask, the tile of columns in a stage of a ring: the next tile that holds a score, and whether all rows
// keep this whole tile.
struct TileStep {
  int next;
  bool whole;
};

// The columns that all rows of the lines [first, first + 64) of a job keep.
template <class Job>
__device__ __forceinline__ Columns kept_by_all(const FoldShape& shape, const Job& job, int first) {
  return shape.kept_by_all(job.row_of(first), job.rows_of(kFragmentRows));
}

// Replaces a tile of dot products by what the score policy holds (FragmentScores), and masks it. The tile has
// the lines [first, first + 64) of a job, and columns from column0 on. is_whole(): whether all these rows
// keep all these columns. It is called only after scores are prepared: if it were called before, kernels of
// sm_80 would spill.
template <TileMonoid M, FragmentScores<M> Scores, class Job, class IsWhole, int kSize>
__device__ __forceinline__ void score_rows(const M& m, float (&tile)[kSize], const Scores& scores,
                                           const FoldShape& shape, const Job& job, int first, int column0,
                                           IsWhole is_whole) {
  scores.prepare(tile, job.row_of(first), column0);
  // Masking costs as much as the fold, so only tiles with masked elements are masked.
  if (!is_whole()) {
    Kept kept[2];
    find_unmasked_columns(kept, shape, [&](int line) { return job.row_of(first + line); }, column0);
    mask_fragment(m, kept, tile);
  }
}

// Folds a tile of dot products into the states of the thread's two rows and replaces it by the payload's
// weights. scale: the factor by which the payload's sums so far must be multiplied.
template <TileMonoid M, FragmentScores<M> Scores, class Job, int kSize>
__device__ __forceinline__ void fold_rows(const M& m, typename M::State (&state)[2], float (&tile)[kSize],
                                          const Scores& scores, const FoldShape& shape, const Job& job,
                                          int first, int column0, bool whole, typename M::Real (&scale)[2]) {
  score_rows(m, tile, scores, shape, job, first, column0, [=] { return whole; });
  fold_fragment(m, state, tile, scores, scale);
  drop_weights(scores, tile, job.row_of(first), column0);
}

// Multiplies the payload's sums by `scale`. Frames (row maxima) settle after a few tiles; then all factors of
// the warp are 1, and nothing is multiplied.
template <PayloadMonoid M, int kSize>
__device__ __forceinline__ void rescale_fragment(float (&sums)[kSize], const typename M::Real (&scale)[2]) {
  using R = typename M::Real;
  if constexpr (!std::is_empty_v<typename M::Frame>) {
    if (__all_sync(0xffffffffu, scale[0] == R(1) && scale[1] == R(1))) return;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i] *= scale[row_of_element(i)].x;
  }
}

// The index of a line's row over [batch, heads, rows].
template <class Job>
__device__ __forceinline__ std::int64_t flat_row(const FoldShape& shape, const Job& job, int line) {
  return (std::int64_t{job.batch} * shape.heads + job.head_of(line)) * shape.rows + job.row_of(line);
}

// Combines the states that the lanes of a row hold, so that each lane has the state of the whole row.
template <PayloadMonoid M>
__device__ __forceinline__ void join_lanes(const M& m, typename M::State (&state)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    state[r] =
        reduce_lanes<kLanesOfRow>(state[r], [&](const auto& s, const auto& t) { return combine(m, s, t); });
}

// The factor that normalises the payload's sums: 1 / mass for attention, 0 for an empty row, 1 for the MLP.
template <PayloadMonoid M>
__device__ __forceinline__ float normalisation(const M& m, const typename M::State& whole) {
  const float mass = m.mass(whole).x;
  return !M::kNormalized ? 1.f : mass == 0.f ? 0.f : 1.f / mass;
}

// Ends the fold of a row from the state of all its columns: joins the sink of its head, if any. Returns the
// factor of the payload's sums.
template <PayloadMonoid M, PayloadRows<M> Rows, class Head>
__device__ __forceinline__ float end_fold(const M& m, typename M::State& state, const Rows& rows, Head head) {
  if constexpr (RowsWithSinks<Rows, M>) {
    if (rows.has_sinks()) {
      const float scale = join_sink(m, state, rows.sink(head())).x;
      return scale * normalisation(m, state);
    }
  }
  return normalisation(m, state);
}

// Ends the folds of the lines [first, first + 64) of a job, and turns the payload's sums into what is
// written. state: on entry, of all columns; on return, of the sink too.
template <PayloadMonoid M, class Job, PayloadRows<M> Rows, int kSize>
__device__ __forceinline__ void end_rows(const M& m, typename M::State (&state)[2], float (&sums)[kSize],
                                         const FoldShape& shape, const Job& job, int first,
                                         const Rows& rows) {
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // A line without a row may lie beyond the last head.
    const auto head = [&] { return ::min(job.head_of(first + fragment_row(r)), shape.heads - 1); };
    factor[r] = end_fold(m, state[r], rows, head);
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) sums[i] *= factor[row_of_element(i)];
  rows.output(sums);
}

// Stores P_i (the log-sum-exp) of the lines [first, first + 64) of a job. state: of the whole rows; sums: as
// they are written. marks: whether results that are not finite are computed again.
template <PayloadMonoid M, class Job, PayloadRows<M> Rows, int kSize>
__device__ __forceinline__ void finish_states(const M& m, const typename M::State (&state)[2],
                                              const float (&sums)[kSize], bool marks, const FoldShape& shape,
                                              const Job& job, int first, const Rows& rows) {
  float probe[2] = {0.f, 0.f};  // NaN if a result is not finite
  if (marks) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) probe[row_of_element(i)] += sums[i] * 0.f;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int line = first + fragment_row(r);
    const float sum = reduce_lanes<kLanesOfRow>(probe[r], [](float a, float b) { return a + b; });
    if (job.has(shape, line) && threadIdx.x % kLanesOfRow == 0)
      rows.store(flat_row(shape, job, line), job.head_of(line), m.project(state[r]), sum == 0.f);
  }
}

// Rounds the sums of the lines [first, first + 64) of a job and writes them to `data`: out.data or out.low.
template <class E, class Job, int kSize>
__device__ __forceinline__ void store_sums(const float (&sums)[kSize], const FoldShape& shape, const Job& job,
                                           int first, const OutputRows& out, void* data) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int line = first + fragment_row(r);
    if (!job.has(shape, line)) continue;
    E* const to = static_cast<E*>(data) + job.batch * out.stride[0] + job.head_of(line) * out.stride[1] +
                  job.row_of(line) * out.stride[2] + fragment_column(0);
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      if (2 * i < out.width) store_pair(to + 2 * i, sums[i + 2 * r], sums[i + 2 * r + 1]);
    }
  }
}

// Writes what rounding lost, if out.low is present.
template <class E, class Rows, class Job, int kSize>
__device__ __forceinline__ void store_low_words(float (&sums)[kSize], const FoldShape& shape, const Job& job,
                                                int first, const OutputRows& out) {
  if constexpr (Rows::kLowWords && !std::is_same_v<E, float>) {
    if (!out.low) return;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i] = low_word(sums[i], float(E(sums[i])));
    store_sums<E>(sums, shape, job, first, out, out.low);
  }
}

// Stores the result of the lines [first, first + 64) of a job: P_i by `rows`, the payload's fold to `out`.
// state: of all columns.
template <class E, PayloadMonoid M, class Job, PayloadRows<M> Rows, int kSize>
__device__ __forceinline__ void finish_rows(const M& m, typename M::State (&state)[2], float (&sums)[kSize],
                                            const FoldShape& shape, const Job& job, int first,
                                            const Rows& rows, const OutputRows& out) {
  end_rows(m, state, sums, shape, job, first, rows);
  finish_states(m, state, sums, shape.partial(), shape, job, first, rows);
  store_sums<E>(sums, shape, job, first, out, out.data);
  store_low_words<E, Rows>(sums, shape, job, first, out);
}

}  // namespace monoidreduce
