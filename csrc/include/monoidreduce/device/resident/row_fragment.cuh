// The forward pass of 64 rows in a warpgroup's fragment: a tile of scores folded into them, and their result.
#pragma once

#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/resident/kept.cuh"

namespace monoidreduce {

// [batch, heads, rows, width] of the payload's element type, a multiple of 8 wide, its rows dense.
struct OutputRows {
  void* data;
  void* low;  // the same of what rounding lost, or null
  std::int64_t stride[3];
  int width;
};

// The columns that all rows of lines [first, + 64) of a job keep.
template <class Job>
__device__ __forceinline__ Columns kept_by_all(const FoldShape& shape, const Job& job, int first) {
  return shape.kept_by_all(job.row_of(first), job.rows_of(kFragmentRows));
}

// A tile of dot products becomes what the policy of scores holds, and absent scores where a row does not keep
// a column. The tile has lines [first, + 64) of a job's rows, and columns from column0 on. is_whole(): whether all these
// rows keep all these columns. It is asked when scores are prepared: before that kernels of sm_80 would spill.
template <TileMonoid M, FragmentScores<M> Scores, class Job, class IsWhole, int kSize>
__device__ __forceinline__ void score_rows(const M& m, float (&tile)[kSize], const Scores& scores,
                                           const FoldShape& shape, const Job& job, int first, int column0,
                                           IsWhole is_whole) {
  scores.prepare(tile, job.row_of(first), column0);
  // Masking costs as much as the fold: only tiles with elements that some row does not keep are masked.
  if (!is_whole()) {
    Kept kept[2];
    find_kept_columns(kept, shape, [&](int line) { return job.row_of(first + line); }, column0);
    mask_fragment(m, kept, tile);
  }
}

// Folds a tile of dot products into the states of the thread's two rows and turns it into the payload's weights. scale: what
// the payload sums so far must be multiplied by.
template <TileMonoid M, FragmentScores<M> Scores, class Job, int kSize>
__device__ __forceinline__ void fold_rows(const M& m, typename M::State (&state)[2], float (&tile)[kSize],
                                          const Scores& scores, const FoldShape& shape, const Job& job,
                                          int first, int column0, bool whole, typename M::Real (&scale)[2]) {
  score_rows(m, tile, scores, shape, job, first, column0, [=] { return whole; });
  fold_fragment(m, state, tile, scores, scale);
}

// Frames settle after a few tiles; then no row of the warp moves.
template <PayloadMonoid M, int kSize>
__device__ __forceinline__ void rescale_fragment(float (&sums)[kSize], const typename M::Real (&scale)[2]) {
  using R = typename M::Real;
  if constexpr (!std::is_empty_v<typename M::Frame>) {
    if (__all_sync(0xffffffffu, scale[0] == R(1) && scale[1] == R(1))) return;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i] *= scale[row_of_element(i)].x;
  }
}

// The row of a line of a job, over [batch, heads, rows].
template <class Job>
__device__ __forceinline__ std::int64_t flat_row(const FoldShape& shape, const Job& job, int line) {
  return (std::int64_t{job.batch} * shape.heads + job.head_of(line)) * shape.rows + job.row_of(line);
}

// Makes the states of the thread's two rows whole: combines the states of all lanes of a row.
template <PayloadMonoid M>
__device__ __forceinline__ void join_lanes(const M& m, typename M::State (&state)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    state[r] =
        reduce_lanes<kLanesOfRow>(state[r], [&](const auto& s, const auto& t) { return combine(m, s, t); });
}

// What the payload's sums are multiplied by.
template <PayloadMonoid M>
__device__ __forceinline__ float normalisation(const M& m, const typename M::State& whole) {
  const float mass = m.mass(whole).x;
  return !M::kNormalized ? 1.f : mass == 0.f ? 0.f : 1.f / mass;
}

// Ends the fold of a row of a head, from the whole state of its columns. Returns what the payload's sums are multiplied by.
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

// Ends the folds of lines [first, + 64) of a job's rows, and turns the payload's sums into what is written. state: whole, of
// the columns before and of the rows behind.
template <PayloadMonoid M, class Job, PayloadRows<M> Rows, int kSize>
__device__ __forceinline__ void end_rows(const M& m, typename M::State (&state)[2], float (&sums)[kSize],
                                         const FoldShape& shape, const Job& job, int first,
                                         const Rows& rows) {
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // A line without a row may be of no head.
    const auto head = [&] { return ::min(job.head_of(first + fragment_row(r)), shape.heads - 1); };
    factor[r] = end_fold(m, state[r], rows, head);
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) sums[i] *= factor[row_of_element(i)];
  rows.output(sums);
}

// P_i of lines [first, + 64) of a job's rows. state: whole; sums: as they are written.
template <PayloadMonoid M, class Job, PayloadRows<M> Rows, int kSize>
__device__ __forceinline__ void finish_states(const M& m, const typename M::State (&state)[2],
                                              const float (&sums)[kSize], const FoldShape& shape,
                                              const Job& job, int first, const Rows& rows) {
  float probe[2] = {0.f, 0.f};  // NaN if a result is not finite
  if (shape.partial()) {
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

// The sums of lines [first, + 64) of a job's rows, rounded, to data: that of out, or its low words.
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

// The same, where it is asked for, of what rounding loses.
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

// The result of lines [first, + 64) of a job's rows: P_i to rows, the payload's fold to out. state: whole, of the columns.
template <class E, PayloadMonoid M, class Job, PayloadRows<M> Rows, int kSize>
__device__ __forceinline__ void finish_rows(const M& m, typename M::State (&state)[2], float (&sums)[kSize],
                                            const FoldShape& shape, const Job& job, int first,
                                            const Rows& rows, const OutputRows& out) {
  end_rows(m, state, sums, shape, job, first, rows);
  finish_states(m, state, sums, shape, job, first, rows);
  store_sums<E>(sums, shape, job, first, out, out.data);
  store_low_words<E, Rows>(sums, shape, job, first, out);
}

}  // namespace monoidreduce
