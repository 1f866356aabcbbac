// The backward pass of a fold with a payload on tensor cores from sm_80 on: a tile of columns stays, the rows
// stream.
//
//   scores^T  = columns . rows^T          u^T = payload . grad_out^T
//   weights^T, dz^T                       the monoid's pull (VJP), in registers; for attention p and dS
//   d_payload += weights^T . grad_out     d_columns += dz^T . rows
//   d_rows     = dz . columns             added to global memory, in any order or one tile of columns after another
//
// Two warps share their columns: each computes the scores of one half of the rows, and the gradients of one
// half of the width. It takes its own half of weights^T and dz^T from registers and the other warp's from
// shared memory. A group of heads shares columns (GQA): the gradient of the columns is summed in registers
// over all of its heads.
#pragma once

#include "monoidreduce/device/arch/reduce_add.cuh"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/device/block/pull_fragment.cuh"
#include "monoidreduce/device/block/warp_operand.cuh"
#include "monoidreduce/device/resident/row_residuals.cuh"
#include "monoidreduce/device/resident/strided_lines.cuh"
#include "monoidreduce/device/resident/unmasked.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"
#include "monoidreduce/device/schedule/semaphores.cuh"

namespace monoidreduce::sm80 {

// kWidth: the larger width, rounded up to whole slabs. kRows, kColumns: of a tile. kStages: tiles of rows in
// shared memory, 1 or 2. kBlocks: blocks that share an SM. Two warps have the same columns, 16 of every 8
// kWarps. kTransposed: the payload and its gradient are [payload width, columns] in memory.
template <int kWidth_, int kRows_, int kColumns_, int kWarps_, int kStages_, int kBlocks_,
          bool kTransposed_ = false>
struct BackwardTile {
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kWidth = kWidth_, kRows = kRows_, kColumns = kColumns_;
  static constexpr int kWarps = kWarps_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStep = 16 * kWarps / 2, kFragments = kColumns / kStep;
  static constexpr int kHalfRows = kRows / 2, kHalfWidth = kWidth / 2;
  // A warp computes 32 rows by kWarpWidth of d_rows.
  static constexpr int kShareRows = 32, kRowGroups = kRows / kShareRows,
                       kWarpWidth = kWidth * kRowGroups / kWarps;
  static_assert(kHalfRows % 16 == 0 && kHalfWidth % 16 == 0 && kWarpWidth % 16 == 0);
  static_assert(kRows / kWarps >= RowSemaphores::kRows);
};

template <class T>
concept BackwardTiling = requires {
  (T::kWidth, T::kRows, T::kColumns, T::kTransposed, T::kWarps, T::kStages, T::kBlocks, T::kThreads);
};

// Shapes as in FoldProblem and FoldGradients (fold.h), unless said otherwise.
struct BackwardArguments {
  StridedLines rows, grad_out, columns, payload;
  StridedLines d_columns, d_payload;
  float* d_rows;         // [batch, heads, rows, width], contiguous
  float* d_column_bias;  // [columns], added to; or null
  RowResiduals residuals;
  RowMarks marks;
  RowSemaphores turns;
  FoldShape shape;
  // Parts that the rows of a job are split into, one block each. With more than one, blocks add to d_columns
  // and d_payload, which then are floats.
  int parts;
};

template <class E, class Tile>
struct BackwardMemory {
  using RowsTile = SharedTile<Tile::kRows, Tile::kWidth, E>;
  using ColumnsTile = SharedTile<Tile::kColumns, Tile::kWidth, E>;  // a transposed payload has as many bytes
  using WeightsTile = SharedTile<Tile::kColumns, (Tile::kRows + kSlabOf<E> - 1) / kSlabOf<E> * kSlabOf<E>, E>;

  unsigned char columns[ColumnsTile::kBytes], payload[ColumnsTile::kBytes];  // their gradients at the end
  unsigned char rows[Tile::kStages][RowsTile::kBytes], grad_out[Tile::kStages][RowsTile::kBytes];
  unsigned char weights[WeightsTile::kBytes], dz[WeightsTile::kBytes];  // each line is a column of the fold
  // Of the rows: P_i (log-sum-exp), and RowPolicy::upstream (centre: grad_lse - delta).
  float product[Tile::kStages][Tile::kRows], upstream[Tile::kStages][Tile::kRows];
  int job;  // RowSemaphores::job
};

// Loads the tiles of rows, for every head of the group, one after another.
template <bool kResiduals, class E, class Tile>
struct BackwardFeed {
  const BackwardArguments& p;
  const ColumnJob& job;
  BackwardMemory<E, Tile>& memory;

  __device__ __forceinline__ int steps() const { return job.tiles * p.shape.group; }
  // Divides only if several heads share columns. (H100, width 128: two divisions per tile cost 2 % of the
  // kernel. A single division, with its results in shared memory until the products are done, was 1 to 3 %
  // slower without groups and 1.5 % faster with them. In the MLP, which has one head, divisions would spill
  // registers of the products.)
  __device__ __forceinline__ int head(int step) const {
    const int group = p.shape.group;
    return group == 1 ? job.column_head : job.column_head * group + step / job.tiles;
  }
  __device__ __forceinline__ int row0(int step) const {
    if constexpr (Tile::kTransposed) return (job.first_tile + step) * Tile::kRows;
    return (job.first_tile + (p.shape.group == 1 ? step : step % job.tiles)) * Tile::kRows;
  }
  // Starts loading the tile of a step, if there is one.
  __device__ __forceinline__ void request(int step) const {
    if (step < steps()) {
      const int stage = step % Tile::kStages, head = this->head(step), row0 = this->row0(step);
      load_tile<Tile::kThreads, Tile::kRows, Tile::kWidth, E>(arch::shared_address(memory.rows[stage]),
                                                              p.rows.head(job.batch, head), row0, 0);
      load_tile<Tile::kThreads, Tile::kRows, Tile::kWidth, E>(arch::shared_address(memory.grad_out[stage]),
                                                              p.grad_out.head(job.batch, head), row0, 0);
      constexpr int kFloats = 4;  // floats in a copy
      const int own = threadIdx.x * kFloats;
      if (kResiduals && own < Tile::kRows) {
        const std::int64_t flat =
            (std::int64_t{job.batch} * p.shape.heads + head) * p.residuals.padded_rows + row0 + own;
        arch::copy_async(arch::shared_address(memory.product[stage] + own), p.residuals.product + flat, true);
        arch::copy_async(arch::shared_address(memory.upstream[stage] + own), p.residuals.upstream + flat,
                         true);
      }
    }
    arch::commit_copies();
  }
  // Called once the first tile has been requested. With two stages, the tile of a step arrives before the
  // step begins: all threads wait for it when they release the tile before (release).
  __device__ __forceinline__ void start() const {
    if constexpr (Tile::kStages == 2) {
      request(1);
      arch::wait_copies<1>();
      __syncthreads();
    }
  }
  // Returns the stage of a step. With one stage, waits here for its tile.
  __device__ __forceinline__ int receive(int step) const {
    if constexpr (Tile::kStages == 1) {
      arch::wait_copies<0>();
      __syncthreads();
    }
    return step % Tile::kStages;
  }
  // Called when the warp is done with the tile of a step: waits for the other warps, and requests the tile
  // that replaces it. (H100, width 128, 16k: 314 TFLOP/s; 310 with the wait at the start of a step and
  // fragments pulled one by one.)
  __device__ __forceinline__ void release(int step) const {
    if constexpr (Tile::kStages == 2) arch::wait_copies<0>();
    __syncthreads();
    request(step + Tile::kStages);
  }
};

template <class E, BackwardTiling Tile, TileMonoid M, PulledScoresOfHeads<M> Scores>
struct BackwardWorker {
  using R = typename M::Real;
  static constexpr int kWidth = Tile::kWidth, kRows = Tile::kRows, kColumns = Tile::kColumns,
                       kFragments = Tile::kFragments, kHalfRows = Tile::kHalfRows,
                       kHalfWidth = Tile::kHalfWidth;
  static constexpr bool kResiduals = !std::is_empty_v<typename M::Frame>;
  // Whether semaphores may fix the order in which blocks add to d_rows. The MLP's deterministic mode has
  // other kernels.
  static constexpr bool kInTurn = MaskableMonoid<M>;
  // How much of the width of d_rows a warp computes at a time: less where float operands, which take two
  // times the words, or biases take registers.
  static constexpr int kShareWidth =
      std::min(Tile::kWarpWidth, sizeof(E) == 4 || kScoresOfElements<Scores> ? 32 : 64);
  // weights^T or dz^T, for half of the rows.
  using Operand = std::uint32_t[kFragments][kWordsOf<E, kHalfRows / 2>];
  // Fragments that are pulled together: one where biases or activations take registers.
  static constexpr int kTogether = kResiduals && !kScoresOfElements<Scores> ? kFragments : 1;
  static constexpr bool kBanded = MaskableMonoid<M>;  // whether a row may be masked
  static constexpr bool kListed = kBanded && kMayBeListed<Scores>;

  const M& m;
  const Scores& all_scores;
  const BackwardArguments& p;
  const ColumnJob& job;
  BackwardMemory<E, Tile>& memory;
  const BackwardFeed<kResiduals, E, Tile> feed{p, job, memory};
  // half: which half of the rows, and of the width, the warp has. own_line: the warp's first of every kStep
  // columns.
  const int warp = threadIdx.x / 32, half = warp / (Tile::kWarps / 2),
            own_line = warp % (Tile::kWarps / 2) * 16;

  float d_columns[kFragments][kHalfWidth / 2], d_payload[kFragments][kHalfWidth / 2];
  float d_bias[kFragments][2] = {};  // of the thread's own columns over half of the rows

  __device__ __forceinline__ static decltype(auto) shape_of(const BackwardArguments& p) {
    if constexpr (kListed)
      return (p.shape);
    else
      return p.shape.without_spans();
  }
  __device__ __forceinline__ decltype(auto) shape() const { return shape_of(p); }
  // The first column of the 64-line fragment that contains the warp's fragment f.
  __device__ __forceinline__ int column0(int f) const {
    return job.column0 + f * Tile::kStep + own_line - warp % 4 * 16;
  }

  // product^T = own columns of a tile . own half of rows^T. kAdjacent: the tile is [width, columns] in
  // memory.
  template <bool kAdjacent>
  __device__ __forceinline__ void multiply_transposed(float (&product)[kFragments][kHalfRows / 2],
                                                      const unsigned char* of_columns,
                                                      const unsigned char* of_rows) const {
    using Left = std::conditional_t<kAdjacent, RowsOfElements<kWidth, E>, RowsOfLines<kColumns, E>>;
    const Left left =
        Left(arch::shared_address(of_columns)).from(kAdjacent ? 0 : own_line, kAdjacent ? own_line : 0);
    const auto right = ColumnsOfLines<kRows, E>(arch::shared_address(of_rows)).from(half * kHalfRows, 0);
    clear(product);
    multiply<E, kWidth>(
        product,
        [&](auto& words, int f, int k) {
          left.load(words, kAdjacent ? k : f * Tile::kStep, kAdjacent ? f * Tile::kStep : k);
        },
        [&](auto& words, int k, int n) { right.load(words, n, k); });
  }

  // sum += operand^T . rows, for the warp's half of the width, over its own half of the rows: the operand
  // comes from registers.
  __device__ __forceinline__ void accumulate_own(float (&sum)[kFragments][kHalfWidth / 2],
                                                 const Operand& operand, const unsigned char* of_rows) const {
    const auto right = ColumnsOfElements<kRows, E>(arch::shared_address(of_rows))
                           .from(0, half * kHalfWidth)
                           .from(half * kHalfRows, 0);
    multiply<E, kHalfRows>(
        sum, [&](auto& words, int f, int k) { operand_of_fragment<E>(words, operand[f], k); },
        [&](auto& words, int k, int n) { right.load(words, k, n); });
  }
  // The same over the other half of the rows: the operand comes from shared memory.
  __device__ __forceinline__ void accumulate_other(float (&sum)[kFragments][kHalfWidth / 2],
                                                   const unsigned char* operand,
                                                   const unsigned char* of_rows) const {
    const int row = (1 - half) * kHalfRows;
    const auto left = RowsOfLines<kColumns, E>(arch::shared_address(operand)).from(own_line, row);
    const auto right =
        ColumnsOfElements<kRows, E>(arch::shared_address(of_rows)).from(0, half * kHalfWidth).from(row, 0);
    multiply<E, kHalfRows>(
        sum, [&](auto& words, int f, int k) { left.load(words, f * Tile::kStep, k); },
        [&](auto& words, int k, int n) { right.load(words, k, n); });
  }

  // The warp's share of a tile of rows (semaphores.cuh). Computed again each time: kept, it would take registers
  // of the products in between.
  __device__ __forceinline__ static int share() { return arch::thread_again() / 32; }
  // Adds the warp's share of d_rows = dz . columns to global memory. full: every row of the tile keeps every
  // column.
  __device__ __forceinline__ void add_rows(int head, int row0, bool full) const {
#pragma unroll 1
    for (int width = 0; width < Tile::kWarpWidth; width += kShareWidth)
      add_share(head, row0, full, warp / Tile::kRowGroups * Tile::kWarpWidth + width);
    if constexpr (kInTurn) p.turns.pass(std::int64_t{job.batch} * p.shape.heads + head, row0, share());
  }
  // The same for kShareWidth of the width.
  __device__ __forceinline__ void add_share(int head, int row0, bool full, int first_width) const {
    constexpr int kParts = Tile::kShareRows / 16;
    const int first_row = warp % Tile::kRowGroups * Tile::kShareRows;
    const auto left = RowsOfElements<kColumns, E, true>(arch::shared_address(memory.dz)).from(0, first_row);
    const auto right =
        ColumnsOfElements<kColumns, E>(arch::shared_address(memory.columns)).from(0, first_width);
    // Waits until those tiles of columns before this one that rows of the tile keep have added.
    if constexpr (kInTurn)
      p.turns.await(std::int64_t{job.batch} * p.shape.heads + head, row0, share(),
                    job.column0 / kColumns - shape().first_column(row0) / kColumns);
    float share[kParts][kShareWidth / 2];
    clear(share);
    multiply<E, kColumns>(
        share, [&](auto& words, int part, int k) { left.load(words, k, part * 16); },
        [&](auto& words, int k, int n) { right.load(words, k, n); });

    const FoldShape& shape = p.shape;
    const std::int64_t batch_head = std::int64_t{job.batch} * shape.heads + head;
    const int width = p.rows.width, lane = threadIdx.x % 32;
    const bool odd = lane % 2;
    // Two neighbouring lanes have 4 adjacent elements of a row in each 8. One lane takes the 4 of the first
    // 8, the other the 4 of the second 8. So four lanes add to 64 bytes of a row. (H100, width 128, 16k: 315
    // TFLOP/s; 290 if they add to 32 bytes of two rows; 345 without additions.)
    const int row = row0 + first_row + lane / 4, column = first_width + lane % 4 / 2 * 4 + 8 * odd;
    float* const to = p.d_rows + (batch_head * shape.rows + row) * width + column;
    const bool marking = kBanded && (shape.masked_by_bias || (!full && this->shape().banded()));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float (&x)[kShareWidth / 2] = share[part];
      if (marking && !is_finite(x)) p.marks.row(batch_head, row0 + first_row) = 1.f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int down = part * 16 + r * 8;
        const bool within = row + down < shape.rows;
#pragma unroll
        for (int i = 2 * r; i < kShareWidth / 2; i += 8) {
          const float low = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 4], 1),
                      high = __shfl_xor_sync(0xffffffffu, odd ? x[i + 1] : x[i + 5], 1);
          const int across = i / 8 * 16;
          if (within && column + across < width) {
            arch::reduce_add(to + std::int64_t{down} * width + across, odd ? low : x[i],
                             odd ? high : x[i + 1], odd ? x[i + 4] : low, odd ? x[i + 5] : high);
          }
        }
      }
    }
  }

  // The gradients of one tile of rows of one head.
  __device__ __forceinline__ void run_tile(int step) {
    const int stage = feed.receive(step), head = feed.head(step), row0 = feed.row0(step);
    if constexpr (SkipsBlocks<Scores>) {
      if (!all_scores.touches(job.batch, head, row0, kRows, job.column0, kColumns)) {
        feed.release(step);
        if constexpr (kInTurn) {
          p.turns.await(std::int64_t{job.batch} * p.shape.heads + head, row0, share(),
                        job.column0 / kColumns - shape().first_column(row0) / kColumns);
          p.turns.pass(std::int64_t{job.batch} * p.shape.heads + head, row0, share());
        }
        return;
      }
    }
    float dots[kFragments][kHalfRows / 2], u[kFragments][kHalfRows / 2];
    multiply_transposed<false>(dots, memory.columns, memory.rows[stage]);
    multiply_transposed<Tile::kTransposed>(u, memory.payload, memory.grad_out[stage]);

    const float *product = memory.product[stage] + half * kHalfRows + fragment_column(0),
                *upstream = memory.upstream[stage] + half * kHalfRows + fragment_column(0);
    const auto residual = [&](int i) {
      const int row = i / 4 * 8 + i % 2;
      if constexpr (kResiduals) {
        return RowResidual<M>{{R(product[row]), R(0)}, R(upstream[row])};
      } else {
        return RowResidual<M>{};
      }
    };
    const bool full = kBanded ? shape().keeps_all(row0, kRows, job.column0, kColumns)
                              : job.column0 + kColumns <= p.shape.columns;
    const int own_row0 = row0 + half * kHalfRows;
    const auto scores_of = [&](int f) -> decltype(auto) {
      return all_scores.pulled(job.batch, head, own_row0, column0(f));
    };
    Operand weights, dz;
    with_named(m, [&](const auto& m) {
#pragma unroll
      for (int first = 0; first < kFragments; first += kTogether) {
#pragma unroll
        for (int f = first; f < first + kTogether; ++f) {
          const auto& scores = scores_of(f);
          scores.prepare_transposed(dots[f], own_row0, column0(f));
          [[maybe_unused]] Kept kept[2];
          if constexpr (kBiasedByElement<Scores> || HasTableGradient<std::remove_cvref_t<decltype(scores)>>)
            find_unmasked_rows(kept, shape(), own_row0, column0(f));
          pull_fragment(m, scores, residual, dots[f], u[f], p.shape.rows, kept, [&](int i, float g) {
            if constexpr (kBiasedByElement<Scores>) {
              if (all_scores.d_bias.data && kept[row_of_element(i)](i)) scores.add_bias_gradient(i, g);
            }
          });
        }
        if (!full) {
#pragma unroll
          for (int f = first; f < first + kTogether; ++f) {
            Kept kept[2];
            find_unmasked_rows(kept, shape(), own_row0, column0(f));
            if constexpr (kBanded) clear_fragment(kept, dots[f]);  // else nobody reads what it clears
            clear_fragment(kept, u[f]);
          }
        }
        // Other warps may have read dz of the previous tile until now. (With one stage: until this tile was
        // received.)
        if (Tile::kStages == 2 && first == 0) __syncthreads();
#pragma unroll
        for (int f = first; f < first + kTogether; ++f) {
          scores_of(f).finish_transposed(dots[f], u[f], own_row0, column0(f));
          if (kBiasedByColumn<Scores> && p.d_column_bias) {
#pragma unroll
            for (int i = 0; i < kHalfRows / 2; ++i) d_bias[f][row_of_element(i)] += u[f][i];
          }
          round_fragment<E>(weights[f], dots[f]);
          round_fragment<E>(dz[f], u[f]);
          const int line = f * Tile::kStep + own_line, element = half * kHalfRows;
          store_operand<E, kColumns>(arch::shared_address(memory.weights), line, element, weights[f]);
          store_operand<E, kColumns>(arch::shared_address(memory.dz), line, element, dz[f]);
        }
      }
    });
    __syncthreads();

    accumulate_own(d_payload, weights, memory.grad_out[stage]);
    accumulate_other(d_payload, memory.weights, memory.grad_out[stage]);
    accumulate_own(d_columns, dz, memory.rows[stage]);
    accumulate_other(d_columns, memory.dz, memory.rows[stage]);
    feed.release(step);
    add_rows(head, row0, full);
  }

  __device__ __forceinline__ void run() {
    clear(d_columns);
    clear(d_payload);
    load_tile<Tile::kThreads, kColumns, kWidth, E>(
        arch::shared_address(memory.columns), p.columns.head(job.batch, job.column_head), job.column0, 0);
    const Lines payload = p.payload.head(job.batch, job.column_head);
    if constexpr (Tile::kTransposed) {
      load_tile<Tile::kThreads, kWidth, kColumns, E, std::is_same_v<E, float>>(
          arch::shared_address(memory.payload), payload, 0, job.column0);
    } else {
      load_tile<Tile::kThreads, kColumns, kWidth, E>(arch::shared_address(memory.payload), payload,
                                                     job.column0, 0);
    }
    feed.request(0);
    if constexpr (std::is_same_v<E, float>) {
      arch::wait_copies<0>();
      round_tile<Tile::kThreads, kColumns, kWidth>(memory.columns);
      if constexpr (Tile::kTransposed) {
        round_tile<Tile::kThreads, kWidth, kColumns, true>(memory.payload);
      } else {
        round_tile<Tile::kThreads, kColumns, kWidth>(memory.payload);
      }
    }
    feed.start();
#pragma unroll 1
    for (int step = 0; step < feed.steps(); ++step) run_tile(step);
    arch::wait_copies<0>();  // still in flight if no row keeps these columns
    __syncthreads();
#pragma unroll
    for (auto& sums : d_payload) keep_sums(all_scores, sums);
  }

  // Stores the gradients of the columns, through the shared memory of the columns and of the payload.
  __device__ __forceinline__ void finish() const {
    const FoldShape& shape = p.shape;
    const std::int64_t column_head = std::int64_t{job.batch} * (shape.heads / shape.group) + job.column_head;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const int line = f * Tile::kStep + own_line, element = half * kHalfWidth;
      const int first_column = job.column0 + line;
      if (this->shape().partial() && first_column < shape.columns &&
          !(is_finite(d_columns[f]) && is_finite(d_payload[f])))
        p.marks.column(column_head, first_column) = 1.f;
      store_result<E, kColumns, false>(arch::shared_address(memory.columns), line, element, d_columns[f]);
      if constexpr (Tile::kTransposed) {
        store_result<E, kWidth, true>(arch::shared_address(memory.payload), element, line, d_payload[f]);
      } else {
        store_result<E, kColumns, false>(arch::shared_address(memory.payload), line, element, d_payload[f]);
      }
      if (kBiasedByColumn<Scores> && p.d_column_bias) {
        // If rows are not split into parts, just the two halves are added to 0, and the order does not
        // matter.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float sum = reduce_lanes<kLanesOfRow>(d_bias[f][r], [](float a, float b) { return a + b; });
          const int own_column = column0(f) + fragment_row(r);
          if (threadIdx.x % kLanesOfRow == 0 && own_column < shape.columns)
            atomicAdd(p.d_column_bias + own_column, sum);
        }
      }
    }
    __syncthreads();
    const bool adds = p.parts > 1;
    store_tile<Tile::kThreads, kColumns, kWidth, E>(p.d_columns.head(job.batch, job.column_head), job.column0,
                                                    0, memory.columns, adds);
    const Lines d_payload_lines = p.d_payload.head(job.batch, job.column_head);
    if constexpr (Tile::kTransposed) {
      store_tile<Tile::kThreads, kWidth, kColumns, E>(d_payload_lines, 0, job.column0, memory.payload, adds);
    } else {
      store_tile<Tile::kThreads, kColumns, kWidth, E>(d_payload_lines, job.column0, 0, memory.payload, adds);
    }
  }
};

template <class E, class Tile, class M, class Scores>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fold_backward_kernel(const __grid_constant__ BackwardArguments p, const __grid_constant__ M m,
                         const __grid_constant__ Scores scores) {
  extern __shared__ __align__(kLineBytes) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<BackwardMemory<E, Tile>*>(shared_bytes);
  using Worker = BackwardWorker<E, Tile, M, Scores>;
  const int number = Worker::kInTurn ? p.turns.job(&memory.job) : blockIdx.x,
            parts = std::is_same_v<E, float> ? p.parts : 1;
  ColumnJob job = column_job<Tile::kRows, Tile::kColumns>(Worker::shape_of(p), number / parts);
  job.take_part(number % parts, parts);
  Worker worker{m, scores, p, job, memory};
  worker.run();
  worker.finish();
}

}  // namespace monoidreduce::sm80
