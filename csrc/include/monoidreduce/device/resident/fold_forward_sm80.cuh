// The forward fold on tensor cores from sm_80 on, for widths up to 256: a tile of rows stays in shared
// memory, columns and payload stream.
//
//   scores = rows . columns^T            fold: scores become weights, in registers
//   sums  += weights . payload           weights from registers
//
// There are four warps, each with 16 rows of every 64. With two fragments of 64 rows, a warp uses each
// operand of columns twice. All warps load; the copies and folds of one block hide behind the products of
// another.
#pragma once

#include "monoidreduce/device/arch/mma.cuh"
#include "monoidreduce/device/block/copy_tile.cuh"
#include "monoidreduce/device/block/warp_operand.cuh"
#include "monoidreduce/device/resident/combine_splits.cuh"
#include "monoidreduce/device/resident/strided_lines.cuh"

namespace monoidreduce::sm80 {

// kWidth: the larger width, rounded up to whole slabs. kFragments: fragments of 64 rows. kStages: tiles of
// columns or payload in shared memory. kBlocks: blocks that share an SM. Registers of a thread: kFragments
// times kWidth / 2 for sums and kColumns / 2 for scores. kTransposed: the payload is [payload width, columns]
// in memory.
template <int kWidth_, int kColumns_, int kFragments_, int kStages_, int kBlocks_, bool kTransposed_ = false>
struct ForwardTile {
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kWidth = kWidth_, kColumns = kColumns_, kFragments = kFragments_;
  static constexpr int kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kRows = kFragmentRows * kFragments, kThreads = 128;
};

template <class T>
concept ForwardTiling = requires {
  (T::kWidth, T::kRows, T::kColumns, T::kFragments, T::kTransposed, T::kStages, T::kBlocks, T::kThreads);
};

// Shapes as in FoldProblem and FoldOutput (fold.h).
struct ForwardArguments {
  StridedLines rows, columns, payload;
  OutputRows out;
  FoldShape shape;
};

template <class E, class Tile>
struct ForwardMemory {
  unsigned char rows[SharedTile<Tile::kRows, Tile::kWidth, E>::kBytes];
  unsigned char ring[Tile::kStages][SharedTile<Tile::kColumns, Tile::kWidth, E>::kBytes];
};

// Loads tiles of columns and payload alternately: step 2 n is the columns of tile n, step 2 n + 1 its
// payload.
template <class E, class Tile>
struct ForwardFeed {
  const Lines columns, payload;
  const int first_tile, tiles;
  ForwardMemory<E, Tile>& memory;

  __device__ __forceinline__ arch::SharedAddress at(int step) const {
    return arch::shared_address(memory.ring[step % Tile::kStages]);
  }
  __device__ __forceinline__ void request(int step) const {
    const int column0 = (first_tile + step / 2) * Tile::kColumns;
    if (step < 2 * tiles) {
      if (step % 2 == 0) {
        load_tile<Tile::kThreads, Tile::kColumns, Tile::kWidth, E>(at(step), columns, column0, 0);
      } else if constexpr (Tile::kTransposed) {
        load_tile<Tile::kThreads, Tile::kWidth, Tile::kColumns, E, std::is_same_v<E, float>>(
            at(step), payload, 0, column0);
      } else {
        load_tile<Tile::kThreads, Tile::kColumns, Tile::kWidth, E>(at(step), payload, column0, 0);
      }
    }
    arch::commit_copies();  // also if nothing was copied, so that groups can be counted
  }
  // Waits for the tile of a step. The memory of the step before is then free.
  __device__ __forceinline__ arch::SharedAddress receive(int step) const {
    arch::wait_copies<Tile::kStages - 2>();
    __syncthreads();
    return at(step);
  }
  // Requests the tile that takes the place of the step before.
  __device__ __forceinline__ void refill(int step) const { request(step + Tile::kStages - 1); }
};

// Instead of a row policy: the columns are split between blocks, which store partial results (split-KV).
template <PayloadMonoid M>
struct RowSplits {
  PartialRows<M> partial;
  int splits;
};

template <class Tile, class Rows>
__device__ __forceinline__ auto job_of_block(const FoldShape& shape, const Rows& rows) {
  if constexpr (requires { rows.splits; }) {
    return SplitSchedule<Tile::kRows, Tile::kColumns>{shape, rows.splits}(blockIdx.x);
  } else {
    return RowSchedule<Tile::kRows, Tile::kColumns>{shape}(blockIdx.x);
  }
}

template <class P, class M>
concept RowsOrSplits = PayloadRows<P, M> || std::same_as<P, RowSplits<M>>;

template <class E, class Tile, class M, class Scores, class Rows>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fold_forward_kernel(const __grid_constant__ ForwardArguments p, const __grid_constant__ M m,
                        const __grid_constant__ Scores all_scores, const __grid_constant__ Rows rows) {
  static_assert(ForwardTiling<Tile>);
  static_assert(TileMonoid<M>);
  static_assert(ScoresOfHeads<Scores, M>);
  static_assert(RowsOrSplits<Rows, M>);
  using R = typename M::Real;
  constexpr int kWidth = Tile::kWidth, kColumns = Tile::kColumns, kFragments = Tile::kFragments;
  extern __shared__ __align__(kLineBytes) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<ForwardMemory<E, Tile>*>(shared_bytes);
  const auto job = job_of_block<Tile>(p.shape, rows);
  const int column_head = job.head / p.shape.group;
  const auto& scores_of = all_scores.of_head(job.batch, job.head);
  const ForwardFeed<E, Tile> feed{p.columns.head(job.batch, column_head),
                                  p.payload.head(job.batch, column_head), job.first_tile, job.tiles, memory};

  load_tile<Tile::kThreads, Tile::kRows, kWidth, E>(arch::shared_address(memory.rows),
                                                    p.rows.head(job.batch, job.head), job.row0, 0);
#pragma unroll
  for (int step = 0; step < Tile::kStages - 1; ++step) feed.request(step);
  if constexpr (std::is_same_v<E, float>) {
    arch::wait_copies<Tile::kStages - 2>();
    round_tile<Tile::kThreads, Tile::kRows, kWidth>(memory.rows);
  }

  const int warp_row = threadIdx.x / 32 * 16;
  const RowsOfLines<Tile::kRows, E> left(arch::shared_address(memory.rows) + warp_row * kLineBytes);
  float sums[kFragments][kWidth / 2];
  clear(sums);
  typename M::State state[kFragments][2];
#pragma unroll
  for (int f = 0; f < kFragments; ++f) state[f][0] = state[f][1] = m.identity();

#pragma unroll 1
  for (int tile = 0; tile < job.tiles; ++tile) {
    if constexpr (SkipsBlocks<Scores>) {
      if (!all_scores.touches(job.batch, job.head, job.row0, Tile::kRows, (job.first_tile + tile) * kColumns,
                              kColumns)) {
        for (int step = 2 * tile; step < 2 * tile + 2; ++step) feed.receive(step), feed.refill(step);
        continue;
      }
    }
    float scores[kFragments][kColumns / 2];
    clear(scores);
    const ColumnsOfLines<kColumns, E> columns(feed.receive(2 * tile));
    feed.refill(2 * tile);
    multiply<E, kWidth>(
        scores, [&](auto& words, int f, int k) { left.load(words, f * kFragmentRows, k); },
        [&](auto& words, int k, int n) { columns.load(words, n, k); });

    using Payload = std::conditional_t<Tile::kTransposed, ColumnsOfFragmentLines<kWidth, E>,
                                       ColumnsOfElements<kColumns, E>>;
    const Payload payload(feed.receive(2 * tile + 1));

    // All fragments advance together, one step at a time, without a branch around their exponentials: while
    // one waits, another computes. (H100, width 128, 8k: 387 TFLOP/s; one fragment after the other, 359.)
    const int column0 = (job.first_tile + tile) * kColumns;
    R scale[kFragments][2];
    bool far = false;
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
      score_rows(m, scores[f], scores_of, p.shape, job, f * kFragmentRows, column0, [&] {
        return p.shape.keeps_all(job.row_of(f * kFragmentRows), job.rows_of(kFragmentRows), column0,
                                 kColumns);
      });
#pragma unroll
    for (int f = 0; f < kFragments; ++f) far |= frame_fragment(m, state[f], scores[f], scores_of, scale[f]);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) rescale_fragment<M>(sums[f], scale[f]);
    if (far) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) round_scores<R>(scores[f], scores_of);
    }
    std::uint32_t weights[kFragments][kWordsOf<E, kColumns / 2>];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      weigh_fragment(m, state[f], scores[f], after_rounding(scores_of, far));
      drop_weights(scores_of, scores[f], job.row_of(f * kFragmentRows), column0);
      round_fragment<E>(weights[f], scores[f]);
    }
    feed.refill(2 * tile + 1);  // not earlier: addresses take registers, and float scores leave the fewest
    multiply<E, kColumns>(
        sums, [&](auto& words, int f, int k) { operand_of_fragment<E>(words, weights[f], k); },
        [&](auto& words, int k, int n) {
          payload.load(words, Tile::kTransposed ? n : k, Tile::kTransposed ? k : n);
        });
  }

  arch::wait_copies<0>();  // of rows that keep no column
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    join_lanes(m, state[f]);
    keep_sums(all_scores, sums[f]);
    if constexpr (requires { rows.splits; }) {
      store_partial_rows<M>(state[f], sums[f], p.shape, job, f * kFragmentRows, rows.partial);
    } else {
      finish_rows<E>(m, state[f], sums[f], p.shape, job, f * kFragmentRows, rows, p.out);
    }
  }
}

}  // namespace monoidreduce::sm80
