// The backward pass of a fold with a payload on Hopper: a tile of columns stays, the rows stream.
//
//   scores^T  = columns . rows^T          u^T = payload . grad_out^T        from shared memory
//   weights^T, dz^T                       the monoid's pull (VJP), in registers; for attention p and dS
//   d_payload += weights^T . grad_out     d_columns += dz^T . rows          left operand from registers
//   d_rows^T   = columns^T . dz^T         from shared memory, then added to global memory by TMA (reduce-add), in any order
//                                         or one tile of columns after another; or not here, but in fold_backward_pass
//                                         or not at all
//
// Two consumer warpgroups each own 64 of the 128 columns; a third warpgroup loads, and adds d_rows. A group
// of heads shares columns (GQA): the gradients of the columns are summed in registers over all of its heads.
//
// The kernel is persistent: a block takes one tile of columns after another. Several blocks may have parts of
// one, each some of its rows or heads (schedule.cuh). The first rows of a job are loaded while the gradients of the job
// before are stored.
//
// In deterministic mode (RowSums::kInTurn) tiles of columns add in a fixed order, and no job is split. The
// last rows go first, because with a causal mask all tiles of a head keep these.
#pragma once

#include "monoidreduce/device/arch/warpgroup.cuh"
#include "monoidreduce/device/block/bias_tile.cuh"
#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/device/block/matrix.cuh"
#include "monoidreduce/device/block/pull_fragment.cuh"
#include "monoidreduce/device/block/ring.cuh"
#include "monoidreduce/device/resident/row_residuals.cuh"
#include "monoidreduce/device/resident/unmasked.cuh"
#include "monoidreduce/device/schedule/parts.h"
#include "monoidreduce/device/schedule/schedule.cuh"
#include "monoidreduce/device/schedule/semaphores.cuh"
#include "monoidreduce/device/schedule/stream_k_fixup.cuh"

namespace monoidreduce::sm90 {

// How several blocks sum d_rows: in any order; in turn, by semaphores (deterministic, with the same bits in
// every run); or not in this kernel, because fold_backward_pass computes d_rows, or nobody wants it.
enum class RowSums { kAnyOrder, kInTurn, kElsewhere };

// kWidth: the width of rows and of the payload, rounded up to whole slabs. kRows: rows of a tile.
// kTransposed: the payload and its gradient are [payload width, columns] in memory (MLP). kStays: the kernel
// is persistent; activations leave too few registers for that. kHasParts: jobs may be split
// (launch/job_split.h).
template <int kWidth_, int kRows_, bool kTransposed_, RowSums kRowSums>
struct BackwardTile {
  static constexpr bool kTransposed = kTransposed_;
  static constexpr bool kAddsRows = kRowSums != RowSums::kElsewhere, kInTurn = kRowSums == RowSums::kInTurn;
  static constexpr bool kStays = !kTransposed, kHasParts = kStays && !kInTurn;
  static constexpr int kWidth = kWidth_, kRows = kRows_, kStages = 2;
  static constexpr int kConsumers = 2, kColumns = kFragmentRows * kConsumers;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  // The number of warps that add to d_rows. In deterministic mode a warp signals the next block only after
  // its reduce-add has completed, so each consumer has an adding warp of its own. (H100, width 128, causal,
  // 8k and 16k: one warp 2.82 and 5.2 ms, two warps 2.70 and 5.0 ms. In any order two are no faster.)
  static constexpr int kAddingWarps = kInTurn ? kConsumers : kAddsRows ? 1 : 0;
  // A consumer's share of d_rows is a slab of the width; if there is only one slab, it is half of the rows.
  static constexpr int kSharedRows = kWidth == kSlab ? kRows / 2 : kRows;
  static_assert(kWidth == kSlab || kWidth == 2 * kSlab);
  static_assert(kRows % kSlab == 0);
  static_assert(kStays || !kInTurn);

  // The first row of a job's n-th tile.
  __device__ __forceinline__ static int row0(const ColumnJob& job, int n) {
    return (job.first_tile + (kInTurn ? job.tiles - 1 - n : n)) * kRows;
  }
};

template <class T>
concept BackwardTiling = requires {
  (T::kWidth, T::kRows, T::kColumns, T::kTransposed, T::kAddsRows, T::kInTurn, T::kConsumers, T::kStages,
   T::kThreads);
};

// For the fix-up of split jobs (stream_k_fixup.cuh): the gradients of columns and payload that consumers store for
// a part of a job.
template <class Tile>
using ColumnFixup = StreamKFixup<kWarpgroup * Tile::kConsumers, Tile::kWidth / 4>;

// Shapes as in FoldProblem and FoldGradients (fold.h), unless said otherwise.
template <class Tile>
struct BackwardArguments {
  arch::TensorMap rows, grad_out, columns, payload;  // boxes of kRows, kRows, kColumns, kColumns lines
  arch::TensorMap d_rows;                            // float; boxes of kSharedRows lines
  arch::TensorMap d_columns, d_payload;              // boxes of 64 lines; transposed, of kWidth
  float* d_column_bias;                              // [columns], written; or null
  RowResiduals residuals;
  RowMarks marks;
  RowSemaphores turns;
  FoldShape shape;
  JobNumbers jobs;
  ColumnFixup<Tile> fixup;
  BiasSource bias;  // boxes of kRows lines; or nothing
};

// With a block mask, the tile of rows in a stage: its head and first row. whole: all of its rows keep all
// columns of the job, by the block mask. last: no tile of the job follows.
struct RowStep {
  int head, row0;
  bool whole, last;
};
// Whether tiles of rows that hold no score are skipped. Not in deterministic mode, where blocks wait for each
// other at every tile.
template <class Tile, class Scores>
inline constexpr bool kSkipsRows = SkipsBlocks<Scores> && !Tile::kInTurn;

// B: the element type of score biases that come in tiles, or void.
template <class Tile, class B>
struct alignas(kSharedAlignment) BackwardMemory {
  using ColumnsTile = SharedTile<Tile::kColumns, Tile::kWidth>;
  using RowsTile = SharedTile<Tile::kRows, Tile::kWidth>;
  using PayloadTile =
      std::conditional_t<Tile::kTransposed, SharedTile<Tile::kWidth, Tile::kColumns>, ColumnsTile>;
  static constexpr int kFloatLine = kLineBytes / sizeof(float);  // floats in a line of d_rows
  static constexpr int kDzBytes = SharedTile<Tile::kColumns, Tile::kRows>::kBytes;
  static constexpr int kOperands = 2 * ColumnsTile::kBytes +
                                   Tile::kStages * (2 * RowsTile::kBytes + kDzBytes + 2 * Tile::kRows * 4) +
                                   Tile::kConsumers * Tile::kSharedRows * kSlab * 4;

  unsigned char columns[ColumnsTile::kBytes], payload[ColumnsTile::kBytes];  // their gradients at the end
  unsigned char rows[Tile::kStages][RowsTile::kBytes], grad_out[Tile::kStages][RowsTile::kBytes];
  unsigned char dz[Tile::kStages][kDzBytes];
  // For each consumer: lines of 32 floats; 64 of the width are two slabs.
  float d_rows[Tile::kConsumers][kSlab / kFloatLine][Tile::kSharedRows][kFloatLine];
  [[no_unique_address]] BiasRings<B, Tile::kConsumers, Tile::kRows, kFragmentRows, kOperands> biases;
  // Of the rows: P_i (log-sum-exp), and RowPolicy::upstream (centre: grad_lse - delta).
  float product[Tile::kStages][Tile::kRows], upstream[Tile::kStages][Tile::kRows];
  ColumnJob job;  // the job, or part of one, whose columns are in memory; tiles < 0: there are no more
  JobPart part;
  Ring<Tile::kStages, ReadBy::kThreads> row_ring, grad_ring;
  Ring<1, ReadBy::kThreads> column_ring;
  RowStep steps[Tile::kStages];  // with a block mask: one for each stage of rows

  // Called by one thread before any other uses the memory. skips: the warps that add d_rows read `steps` too.
  __device__ __forceinline__ void init(bool skips) {
    row_ring.init(Tile::kConsumers, skips ? Tile::kAddingWarps : 0);
    grad_ring.init(Tile::kConsumers);
    column_ring.init(Tile::kConsumers, Tile::kAddingWarps);
    biases.init();
    arch::fence_init();
  }
};

// Named barriers. kBothConsumers: of both. For each consumer: its share of d_rows is complete (kShareReady),
// or has been read (kShareFree); kOneConsumer: its own threads.
inline constexpr int kBothConsumers = 1, kShareReady = 2, kShareFree = 4, kOneConsumer = 6;

// Iterates over the tiles of rows of a job that hold a score by the block mask, head by head.
template <class Tile, class Scores>
struct HeldRows {
  const FoldShape& shape;
  const ColumnJob& job;
  const Scores& scores;
  int head, tile;

  __device__ __forceinline__ HeldRows(const FoldShape& shape, const ColumnJob& job, const Scores& scores)
      : shape(shape), job(job), scores(scores), head(job.first_head), tile(job.first_tile) {
    find();
  }
  __device__ __forceinline__ bool done() const { return head == job.end_head; }
  __device__ __forceinline__ void advance() {
    ++tile;
    find();
  }
  __device__ __forceinline__ bool whole() const { return strip().template whole<Tile::kRows>(tile); }

 private:
  __device__ __forceinline__ auto strip() const {
    return scores.strip_of_columns(job.batch, head, job.column0, Tile::kColumns);
  }
  // Moves to the next such tile, starting with the current one.
  __device__ __forceinline__ void find() {
    const int end = job.first_tile + job.tiles;
    for (; !done(); ++head, tile = job.first_tile) {
      tile = strip().template next<Tile::kRows>(tile, end);
      if (tile < end) return;
    }
  }
};

// The producer: loads the tiles of every job of the block. Called by one thread. kResiduals: the monoid's
// pull reads the rows' P_i.
template <bool kResiduals, class Tile, class B, class Scores>
__device__ __forceinline__ void produce(const BackwardArguments<Tile>& p, const Scores& scores,
                                        BackwardMemory<Tile, B>& memory) {
  using RowsTile = typename BackwardMemory<Tile, B>::RowsTile;
  using ColumnsTile = typename BackwardMemory<Tile, B>::ColumnsTile;
  using PayloadTile = typename BackwardMemory<Tile, B>::PayloadTile;
  constexpr int kValueBytes = kResiduals ? Tile::kRows * sizeof(float) : 0;
  RingPosition<1> columns_at;
  RingPosition<Tile::kStages> at;
  typename decltype(memory.biases)::Position bias_at;
#pragma unroll 1
  for (int number = p.jobs.first(); number < p.jobs.end(); number = p.jobs.next(number)) {
    ColumnJob job = column_job<Tile::kRows, Tile::kColumns>(p.shape, p.jobs, number);
    const auto load_columns = [&] {
      arch::Mbarrier* const arrived = memory.column_ring.acquire(columns_at, 2 * ColumnsTile::kBytes, [&] {
        memory.job = job;
        if constexpr (Tile::kHasParts) memory.part = p.jobs.part(number);
      });
      columns_at.advance();
      const arch::Box columns{0, job.column0, job.column_head, job.batch};
      ColumnsTile{memory.columns}.load(p.columns, columns, arrived);
      const arch::Box payload =
          Tile::kTransposed ? arch::Box{job.column0, 0, job.column_head, job.batch} : columns;
      PayloadTile{memory.payload}.load(p.payload, payload, arrived);
    };
    // The first tile of rows is loaded before the columns: the memory of the columns is in use until the
    // gradients of the last job are stored from it.
    bool first = true;
    const auto load_rows = [&](int head, int row0, auto write_step) {
      [[maybe_unused]] const std::int64_t values =
          (std::int64_t{job.batch} * p.shape.heads + head) * p.residuals.padded_rows;
      const arch::Box box{0, row0, head, job.batch};
      arch::Mbarrier* arrived = memory.row_ring.acquire(at, RowsTile::kBytes + kValueBytes, write_step);
      RowsTile{memory.rows[at.stage]}.load(p.rows, box, arrived);
      if constexpr (kResiduals)
        arch::load(memory.product[at.stage], p.residuals.product + values + row0, kValueBytes, arrived);
      arrived = memory.grad_ring.acquire(at, RowsTile::kBytes + kValueBytes);
      RowsTile{memory.grad_out[at.stage]}.load(p.grad_out, box, arrived);
      if constexpr (kResiduals)
        arch::load(memory.upstream[at.stage], p.residuals.upstream + values + row0, kValueBytes, arrived);
      if (first) load_columns(), first = false;
      if constexpr (!std::is_void_v<B>) {
        memory.biases.load(p.bias, bias_at, [&](int w) {
          return arch::Box{job.column0 + w * kFragmentRows, row0, head, job.batch};
        });
      }
      at.advance();
    };
    if constexpr (kSkipsRows<Tile, Scores>) {
      HeldRows<Tile, Scores> held(p.shape, job, scores);
      if (held.done()) job.tiles = 0;
#pragma unroll 1
      while (!held.done()) {
        RowStep step{held.head, held.tile * Tile::kRows, held.whole(), false};
        held.advance();
        step.last = held.done();
        load_rows(step.head, step.row0, [&] { memory.steps[at.stage] = step; });
      }
    } else {
      for (int head = job.first_head; head < job.end_head; ++head) {
#pragma unroll 1
        for (int n = 0; n < job.tiles; ++n) load_rows(head, Tile::row0(job, n), [] {});
      }
    }
    if (first) load_columns();
  }
  memory.column_ring.acquire(columns_at, 0, [&] { memory.job.tiles = -1; });
}

// Adds the consumers' shares of d_rows to global memory. Called by each of the adding warps.
template <class Tile, class Scores, class Memory>
__device__ __forceinline__ void add_rows(const BackwardArguments<Tile>& p, Memory& memory, int adding_warp) {
  constexpr int kThreads = kWarpgroup + 32;
  const auto each_share = [&](auto&& run) {
#pragma unroll
    for (int w = 0; w < Tile::kConsumers; w += Tile::kAddingWarps)
      run(Tile::kAddingWarps == 1 ? w : adding_warp);
  };
  each_share([](int w) { arch::arrive_threads(kShareFree + w, kThreads); });
  [[maybe_unused]] RingPosition<Tile::kStages> at;
#pragma unroll 1
  for (RingPosition<1> columns_at;; columns_at.advance()) {
    memory.column_ring.wait(columns_at);
    const ColumnJob job = memory.job;
    memory.column_ring.release(columns_at);
    if (job.tiles < 0) return;
    const auto add = [&](int head, int row0) {
      const std::int64_t batch_head = std::int64_t{job.batch} * p.shape.heads + head;
      each_share([&](int w) {
        if constexpr (Tile::kInTurn) {
          // Waits until those tiles of columns before this one that rows of the tile keep have added.
          p.turns.await(batch_head, row0, w,
                        job.column0 / Tile::kColumns - p.shape.first_column(row0) / Tile::kColumns);
          arch::fence_async_global();
        }
        arch::sync_threads(kShareReady + w, kThreads);
        if (arch::elect()) {
          const int inner = Tile::kWidth == kSlab ? 0 : w * kSlab,
                    row = row0 + (Tile::kWidth == kSlab ? w * Tile::kSharedRows : 0);
#pragma unroll
          for (int slab = 0; slab < 2; ++slab)
            arch::reduce_add(p.d_rows, {inner + slab * 32, row, head, job.batch}, memory.d_rows[w][slab]);
          arch::commit_stores();
          arch::wait_stores_read<0>();
        }
        __syncwarp();
        arch::arrive_threads(kShareFree + w, kThreads);
        if constexpr (Tile::kInTurn) {
          if (arch::elect()) arch::wait_stores<0>();
          p.turns.pass(batch_head, row0, w);
        }
      });
    };
    if constexpr (kSkipsRows<Tile, Scores>) {
#pragma unroll 1
      for (bool more = job.tiles > 0; more; at.advance()) {
        memory.row_ring.wait(at);
        const RowStep step = memory.steps[at.stage];
        memory.row_ring.release(at);
        add(step.head, step.row0);
        more = !step.last;
      }
    } else {
      for (int head = job.first_head; head < job.end_head; ++head) {
#pragma unroll 1
        for (int n = 0; n < job.tiles; ++n) add(head, Tile::row0(job, n));
      }
    }
  }
}

// Adds a transposed fragment's gradients with respect to the biases to global memory. If all rows share a
// bias, the tile's rows are summed first.
struct BiasGradient {
  const Tensor& to;
  const bool owned;  // each element is written once, so that no atomic is needed
  char* at[2];       // the element of the thread's first row, for each of its two columns
  const float factor;
  const int rows;  // number of rows from the thread's first one on
  Kept kept[2];
  float sums[2] = {0.f, 0.f};

  template <class Scores>
  __device__ __forceinline__ BiasGradient(const Scores& scores, const FoldShape& shape, int batch, int head,
                                          int row0, int column0)
      : to(scores.d_bias),
        owned(scores.owns_d_bias),
        factor(1.f / scores.natural_scale),
        rows(shape.rows - row0 - fragment_column(0)) {
    const Matrix<float> matrix(to, batch, head);
    find_unmasked_rows(kept, shape, row0, column0);
#pragma unroll
    for (int r = 0; r < 2; ++r) at[r] = matrix.at(row0 + fragment_column(0), column0 + fragment_row(r));
  }
  __device__ __forceinline__ void operator()(int i, float g) {
    const int r = row_of_element(i), down = i / 4 * 8 + i % 2;
    if (!kept[r](i) || down >= rows) return;
    float* const element = reinterpret_cast<float*>(at[r] + down * to.stride[2]);
    if (owned) {
      *element = g * factor;
    } else if (to.stride[2] == 0) {
      sums[r] += g;
    } else {
      atomicAdd(element, g * factor);
    }
  }
  __device__ __forceinline__ void finish() const {
    if (owned || to.stride[2] != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = reduce_lanes<kLanesOfRow>(sums[r], [](float a, float b) { return a + b; });
      if (threadIdx.x % kLanesOfRow == 0 && kept[r].count > 0)
        atomicAdd(reinterpret_cast<float*>(at[r]), sum * factor);
    }
  }
};

template <class S, class M>
concept BackwardScores =
    TransposedScores<S, M> || ScoresWithTiles<S> || (kScoresOfElements<S> && PulledScoresOfHeads<S, M>);

template <class E, BackwardTiling Tile, TileMonoid M, BackwardScores<M> Scores>
struct BackwardConsumer {
  using R = typename M::Real;
  static constexpr int kWidth = Tile::kWidth, kRows = Tile::kRows, kColumns = Tile::kColumns;
  static constexpr bool kResiduals = !std::is_empty_v<typename M::Frame>;
  using Memory = BackwardMemory<Tile, BiasElement<Scores>>;

  const M& m;
  const Scores& scores;
  const BackwardArguments<Tile>& p;
  Memory& memory;
  const int warpgroup;

  RingPosition<1> columns_at{};
  RingPosition<Tile::kStages> at{};
  typename decltype(Memory::biases)::Position bias_at{};

  float d_columns[kWidth / 2], d_payload[kWidth / 2];
  float d_bias[2];  // of the thread's own columns, if wanted

  __device__ __forceinline__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }
  __device__ __forceinline__ bool bias_wanted() const { return kBiasedByColumn<Scores> && p.d_column_bias; }

  // product^T = this consumer's 64 lines of a tile of columns . rows^T; asynchronous. kAdjacent: the tile is
  // [width, columns] in memory.
  template <bool kAdjacent>
  __device__ __forceinline__ void multiply_transposed(float (&product)[kRows / 2],
                                                      const unsigned char* of_columns,
                                                      const unsigned char* of_rows) {
    using Left = std::conditional_t<kAdjacent, AlongRows<kWidth>, AlongWidth<kColumns>>;
    const int own = kAdjacent ? warpgroup * kWidth * kLineBytes : warpgroup * kFragmentRows * kLineBytes;
    const Left left(arch::shared_address(of_columns) + own);
    const AlongWidth<kRows> right(arch::shared_address(of_rows));
    arch::pin(product);
    arch::fence_wgmma();
#pragma unroll
    for (int k = 0; k < kWidth / kProductDepth; ++k)
      arch::Wgmma<E, kRows>::template shared<kAdjacent, false>(product, left[k], right[k], k > 0);
    arch::commit_wgmma();
  }
  // sum += operand . rows, with the operand from registers; asynchronous.
  __device__ __forceinline__ void accumulate(float (&sum)[kWidth / 2],
                                             const std::uint32_t (&operand)[kRows / 4],
                                             const unsigned char* of_rows) {
    const AlongRows<kRows> right(arch::shared_address(of_rows));
    arch::pin(sum);
    arch::fence_wgmma();
#pragma unroll
    for (int k = 0; k < kRows / kProductDepth; ++k)
      arch::Wgmma<E, kWidth>::template registers<true>(sum, &operand[4 * k], right[k], true);
    arch::commit_wgmma();
  }
  // This consumer's share of d_rows^T = columns^T . dz^T; asynchronous.
  __device__ __forceinline__ void multiply_share(float (&share)[Tile::kSharedRows / 2],
                                                 const unsigned char* dz) {
    const int width_slab = kWidth == kSlab ? 0 : warpgroup, row_slab = kWidth == kSlab ? warpgroup : 0;
    const AlongRows<kColumns> left(arch::shared_address(memory.columns) + width_slab * kColumns * kLineBytes);
    const int row = row_slab * Tile::kSharedRows;
    const AlongRows<kColumns> right(arch::shared_address(dz) + row / kSlab * kColumns * kLineBytes +
                                    row % kSlab * static_cast<int>(sizeof(E)));
    arch::pin(share);
    arch::fence_wgmma();
#pragma unroll
    for (int k = 0; k < kColumns / kProductDepth; ++k)
      arch::Wgmma<E, Tile::kSharedRows>::template shared<true, true>(share, left[k], right[k], k > 0);
    arch::commit_wgmma();
  }

  __device__ __forceinline__ decltype(auto) shape() const {
    if constexpr (kMayBeListed<Scores>)
      return (p.shape);
    else
      return p.shape.without_spans();
  }

  // The scores of a tile that is being multiplied. What does not depend on the products, the mask, is
  // computed meanwhile. Deterministic mode evaluates the mask after the products: there no tile is known to
  // be whole, and mask bits computed in advance, without a branch, spilled 256 bytes (NVRTC 13.0).
  static constexpr int kAsked = Tile::kInTurn ? 0 : kRows;
  __device__ __forceinline__ decltype(auto) scores_of_tile(const ColumnJob& job, int head, int row0,
                                                           int column0, bool whole) const {
    if constexpr (SkipsBlocks<Scores>)
      return scores.template pulled_tile<kAsked>(job.batch, head, row0, column0, whole);
    else
      return (scores);
  }

  // The gradients of one tile of rows of one head. whole: by the block mask, all of its rows keep all columns
  // of the job.
  __device__ __forceinline__ void run_tile(const ColumnJob& job, int head, int row0,
                                           [[maybe_unused]] bool whole) {
    const int own_column0 = job.column0 + warpgroup * kFragmentRows;
    float dots[kRows / 2], u[kRows / 2];
    memory.row_ring.wait(at);
    multiply_transposed<false>(dots, memory.columns, memory.rows[at.stage]);
    memory.grad_ring.wait(at);
    multiply_transposed<Tile::kTransposed>(u, memory.payload, memory.grad_out[at.stage]);
    [[maybe_unused]] const auto& own_scores = scores_of_tile(job, head, row0, own_column0, whole);
    // Listed spans are read from memory: here, while the tile is being multiplied.
    const bool full = shape().keeps_all(row0, kRows, own_column0, kFragmentRows);
    arch::wait_wgmma<0>();
    arch::pin(dots);
    arch::pin(u);

    const float *product = memory.product[at.stage] + fragment_column(0),
                *upstream = memory.upstream[at.stage] + fragment_column(0);
    const auto residual = [&](int i) {
      const int row = i / 4 * 8 + i % 2;
      if constexpr (kResiduals) {
        return RowResidual<M>{{R(product[row]), R(0)}, R(upstream[row])};
      } else {
        return RowResidual<M>{};
      }
    };
    const auto pull = [&](const auto& scores, auto&& see) {
      scores.prepare_transposed(dots, row0, own_column0);
      pull_fragment(m, scores, residual, dots, u, see);
      if (!full) {
        Kept kept[2];
        find_unmasked_rows(kept, shape(), row0, own_column0);
        clear_fragment(kept, dots);
        clear_fragment(kept, u);
      }
      scores.finish_transposed(dots, u, row0, own_column0);
    };
    if constexpr (kBiasedByTile<Scores>) {
      using Biases = typename decltype(Memory::biases)::Tile::OfColumns;
      const auto biased_scores =
          scores.pulled(Biases(memory.biases.wait(warpgroup, bias_at), scores.rows_share));
      if (scores.d_bias.data) {
        BiasGradient gradient(scores, p.shape, job.batch, head, row0, own_column0);
        pull(biased_scores, gradient);
        gradient.finish();
      } else {
        pull(biased_scores, Unseen{});
      }
      memory.biases.release(warpgroup, bias_at);
    } else if constexpr (HasTableGradient<std::remove_cvref_t<decltype(own_scores)>>) {
      Kept kept[2];
      find_unmasked_rows(kept, shape(), row0, own_column0);
      auto sums = own_scores.table_gradient(dots, p.shape.rows, kept);
      pull(own_scores, sums);
      sums.finish();
    } else {
      pull(own_scores, Unseen{});
    }
    if (bias_wanted()) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) d_bias[row_of_element(i)] += u[i];
    }
    std::uint32_t weights[kRows / 4], dz[kRows / 4];
    round_fragment<E>(weights, dots);
    round_fragment<E>(dz, u);
    if constexpr (!Tile::kAddsRows) {
      accumulate(d_payload, weights, memory.grad_out[at.stage]);
      accumulate(d_columns, dz, memory.rows[at.stage]);
      arch::wait_wgmma<1>();
      memory.grad_ring.release(at);
      arch::wait_wgmma<0>();
      arch::pin(d_columns);
      arch::pin(d_payload);
      memory.row_ring.release(at);
      return;
    }
    store_fragment<kColumns>(arch::shared_address(memory.dz[at.stage]), warpgroup * kFragmentRows, dz);

    accumulate(d_payload, weights, memory.grad_out[at.stage]);
    arch::fence_async_shared();
    arch::sync_threads(kBothConsumers, 2 * kWarpgroup);
    float share[Tile::kSharedRows / 2];
    multiply_share(share, memory.dz[at.stage]);
    arch::wait_wgmma<1>();
    memory.grad_ring.release(at);
    accumulate(d_columns, dz, memory.rows[at.stage]);
    arch::wait_wgmma<1>();
    arch::pin(share);
    if ((p.shape.masked_by_bias || (!full && shape().banded())) && !is_finite(share))
      mark_rows(job, head, row0);
    arch::sync_threads(kShareFree + warpgroup, kWarpgroup + 32);
    store_share(share);
    arch::fence_async_shared();
    arch::arrive_threads(kShareReady + warpgroup, kWarpgroup + 32);
    arch::wait_wgmma<0>();
    arch::pin(d_columns);
    arch::pin(d_payload);
    memory.row_ring.release(at);
  }

  // A share is 64 of the width x rows. In memory it lies as lines of rows, swizzled, in two slabs of 32 of
  // the width. Elements of a thread that are 8 apart in width or 1 in row go to different chunks, so no two
  // threads of a warp use the same bank.
  __device__ __forceinline__ void store_share(const float (&share)[Tile::kSharedRows / 2]) {
    const int width = fragment_row(0), row = fragment_column(0);
    const arch::SharedAddress at = arch::shared_address(memory.d_rows[warpgroup]) +
                                   (width / 32 * Tile::kSharedRows + row) * kLineBytes +
                                   ((width % 32 / 4) ^ (row % 8)) * 16 + width % 4 * 4;
#pragma unroll
    for (int i = 0; i < Tile::kSharedRows / 2; ++i) {
      const arch::SharedAddress other = at ^ (row_of_element(i) * 2 * 16) ^ (i % 2 * (kLineBytes | 16));
      arch::store(other + i / 4 * 8 * kLineBytes, share[i]);
    }
  }

  // Waits for the next job and its columns.
  __device__ __forceinline__ const ColumnJob& receive() {
    memory.column_ring.wait(columns_at);
    return memory.job;  // by reference: a copy would take registers
  }

  // Processes all tiles of rows of a job.
  __device__ __forceinline__ void run(const ColumnJob& job) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) d_columns[i] = d_payload[i] = 0.f;
    d_bias[0] = d_bias[1] = 0.f;
    if constexpr (kSkipsRows<Tile, Scores>) {
#pragma unroll 1
      for (bool more = job.tiles > 0; more; at.advance()) {
        memory.row_ring.wait(at);
        const RowStep step = memory.steps[at.stage];
        run_tile(job, step.head, step.row0, step.whole);
        more = !step.last;
      }
    } else {
      for (int head = job.first_head; head < job.end_head; ++head) {
#pragma unroll 1
        for (int n = 0; n < job.tiles; ++n) {
          run_tile(job, head, Tile::row0(job, n), false);
          at.advance();
        }
      }
    }
    keep_sums(scores, d_payload);
  }

  // Marks the rows that this consumer's share of d_rows belongs to for repair.cuh.
  __device__ __forceinline__ void mark_rows(const ColumnJob& job, int head, int row0) const {
    const int row = row0 + (kWidth == kSlab ? warpgroup * Tile::kSharedRows : 0);
    p.marks.row(std::int64_t{job.batch} * p.shape.heads + head, row) = 1.f;
  }

  // Called when the columns are no longer needed, and what was stored from their memory has been read: frees
  // the memory.
  __device__ __forceinline__ void release_columns() {
    if (leads()) arch::wait_stores_read<0>();
    memory.column_ring.release(columns_at);
    columns_at.advance();
  }

  // Stores the gradients of the columns, through the shared memory of the columns and of the payload.
  __device__ __forceinline__ void store_columns(const ColumnJob& job) {
    // Waits until the other consumer's last product has read the columns.
    arch::sync_threads(kBothConsumers, 2 * kWarpgroup);
    std::uint32_t rounded[kWidth / 4];
    const int first = warpgroup * kFragmentRows;
    if (shape().partial() && !(is_finite(d_columns) && is_finite(d_payload))) {
      const std::int64_t column_head =
          std::int64_t{job.batch} * (p.shape.heads / p.shape.group) + job.column_head;
      if (job.column0 + first < p.shape.columns) p.marks.column(column_head, job.column0 + first) = 1.f;
    }
    round_fragment<E>(rounded, d_columns);
    store_fragment<kColumns>(arch::shared_address(memory.columns), first, rounded);
    round_fragment<E>(rounded, d_payload);
    if constexpr (Tile::kTransposed) {
      store_fragment_transposed(arch::shared_address(memory.payload) + warpgroup * kWidth * kLineBytes,
                                rounded);
    } else {
      store_fragment<kColumns>(arch::shared_address(memory.payload), first, rounded);
    }
    if (bias_wanted()) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = reduce_lanes<kLanesOfRow>(d_bias[r], [](float a, float b) { return a + b; });
        const int column = job.column0 + first + fragment_row(r);
        if (threadIdx.x % kLanesOfRow == 0 && column < p.shape.columns) p.d_column_bias[column] = sum;
      }
    }
    arch::fence_async_shared();
    arch::sync_threads(kOneConsumer + warpgroup, kWarpgroup);
    if (leads()) {
      for (int slab = 0; slab < kWidth / kSlab; ++slab) {
        const arch::Box at{slab * kSlab, job.column0 + first, job.column_head, job.batch};
        const int offset = (slab * kColumns + first) * kLineBytes;
        arch::store(p.d_columns, at, memory.columns + offset);
        if constexpr (!Tile::kTransposed) arch::store(p.d_payload, at, memory.payload + offset);
      }
      if constexpr (Tile::kTransposed) {
        arch::store(p.d_payload, {job.column0 + first, 0, job.column_head, job.batch},
                    memory.payload + warpgroup * kWidth * kLineBytes);
      }
      arch::commit_stores();
    }
  }

  // For a part of a job: joins all parts if it has the job's last tile, and returns true. Otherwise stores
  // its sums for the block that does.
  __device__ __forceinline__ bool join_parts(const JobPart& own_part) {
    constexpr int kOfOne = kWidth / 2 / 4;
    const ColumnFixup<Tile>& fixup = p.fixup;
    const auto part = [&](int n) -> float* {
      return n < kOfOne ? &d_columns[4 * n] : &d_payload[4 * (n - kOfOne)];
    };
    if (!own_part.joins()) {
      fixup.leave(own_part.own, [&](int n) {
        const float* const own = part(n);
        return float4{own[0], own[1], own[2], own[3]};
      });
      return false;
    }
#pragma unroll 1
    for (int place = own_part.first; place < own_part.last; ++place) {
      fixup.take(place, [&](const float4* other) {
#pragma unroll
        for (int n = 0; n < 2 * kOfOne; ++n) {
          const float4 quad = other[n * ColumnFixup<Tile>::kThreads];
          float* const own = part(n);
          own[0] += quad.x, own[1] += quad.y, own[2] += quad.z, own[3] += quad.w;
        }
      });
    }
    return true;
  }
};

template <class E, class Tile, class M, class Scores>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fold_backward_kernel(const __grid_constant__ BackwardArguments<Tile> p, const __grid_constant__ M m,
                         const __grid_constant__ Scores scores) {
  extern __shared__ unsigned char shared_bytes[];
  using Consumer = BackwardConsumer<E, Tile, M, Scores>;
  auto& memory = *reinterpret_cast<typename Consumer::Memory*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) memory.init(kSkipsRows<Tile, Scores>);
  __syncthreads();

  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == Tile::kConsumers) {
    arch::setmaxnreg_dec<24>();
    const int warp = arch::uniform(threadIdx.x % kWarpgroup / 32);
    if (warp == 0) {
      if (arch::elect()) produce<Consumer::kResiduals>(p, scores, memory);
    } else if constexpr (Tile::kAddsRows) {
      if (warp <= Tile::kAddingWarps) add_rows<Tile, Scores>(p, memory, warp - 1);
    }
  } else {
    arch::setmaxnreg_inc<240>();
    Consumer consumer{m, scores, p, memory, warpgroup};
    do {
      const ColumnJob& job = consumer.receive();
      if (job.tiles < 0) break;
      consumer.run(job);
      if (!Tile::kHasParts || memory.part.whole() || consumer.join_parts(memory.part))
        consumer.store_columns(job);
      consumer.release_columns();
    } while (Tile::kStays);
    if constexpr (Tile::kAddsRows)
      // Waits until the last share has been read.
      arch::sync_threads(kShareFree + warpgroup, kWarpgroup + 32);
  }
}

}  // namespace monoidreduce::sm90
