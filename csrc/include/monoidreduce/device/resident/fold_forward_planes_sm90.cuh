// The forward fold on Hopper for float32 operands of a width up to 256, with float32's accuracy: by fp16 planes
// (block/planes_sm90.cuh).
//
// The structure is that of fold_forward_sm90.cuh. A tile's products take three times as long beside its fold, so a consumer waits
// for them, and the other consumers' folds fill that time. While it folds a tile itself, the scores of its next tile are multiplied
// (kAhead; measured in docs/design/attention.md).
//
// Widths over 128 take the two blocks of a cluster. Each has half of the width of all operands and of the output. They add
// up their dot products (block/shared_width_sm90.cuh), and both fold all scores.
#pragma once

#include "monoidreduce/device/block/bias_fragment.cuh"
#include "monoidreduce/device/block/planes_sm90.cuh"
#include "monoidreduce/device/block/ring.cuh"
#include "monoidreduce/device/block/shared_width_sm90.cuh"
#include "monoidreduce/device/program/plane_scores.cuh"
#include "monoidreduce/device/resident/row_fragment.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"

namespace monoidreduce::sm90 {

// kWidth: of rows, columns and payload in a block, a multiple of 64. A thread of a consumer has kWidth / 2 registers of
// sums and as many of a tile's product, and 32 for the scores of each 64 of the width. kBlocks: 1, or 2 that share
// the width, with kSlots (PartialDots).
template <int kWidth_, int kConsumers_, int kStages_, int kBlocks_ = 1, int kSlots_ = 1>
struct PlanesTile {
  static constexpr int kWidth = kWidth_, kColumns = kPlaneLines, kConsumers = kConsumers_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_, kSlots = kSlots_;
  static constexpr int kRows = kFragmentRows * kConsumers;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
};

// Shapes as in FoldProblem and FoldOutput (fold.h).
struct PlanesArguments {
  PlaneMaps rows, columns, payload;
  OutputRows out;               // float32
  unsigned long long* counter;  // RowSchedule::counter
  FoldShape shape;
};

template <class Tile>
struct PlanesMemory {
  using Operand = PlaneTile<Tile::kWidth>;
  Operand rows[Tile::kConsumers], columns[Tile::kStages], payload[Tile::kStages];
  RowJob job[Tile::kConsumers];                       // tiles < 0: there are no more jobs
  Columns whole[Tile::kConsumers];                    // the columns that all rows of a consumer keep
  Ring<Tile::kConsumers, ReadBy::kThreads> row_ring;  // a stage for each consumer
  Ring<Tile::kStages, ReadBy::kThreads> column_ring, payload_ring;
  PartialDotsMemoryOf<Tile> partial_dots;
  TileStep steps[Tile::kStages];  // with a block mask: one for each stage of columns

  // Called by one thread before any other uses the memory.
  __device__ __forceinline__ void init() {
    partial_dots.init();
    row_ring.init(1);
    column_ring.init(Tile::kConsumers);
    payload_ring.init(Tile::kConsumers);
    arch::fence_init();
  }
};

// The producer: loads the tiles of every job of the block. Called by one thread.
template <class Tile, class Schedule, class Scores>
__device__ __forceinline__ void produce_planes(const PlanesArguments& p, const Schedule& schedule,
                                               const Scores& scores, PlanesMemory<Tile>& memory) {
  constexpr bool kSkips = SkipsBlocks<Scores>;
  using Operand = typename PlanesMemory<Tile>::Operand;
  RingPosition<Tile::kConsumers> row_at;
  RingPosition<Tile::kStages> column_at, payload_at;
  const auto next_job = [&](int index) {
    return Tile::kBlocks == 1 ? schedule.next(index) : index + int(gridDim.x) / Tile::kBlocks;
  };
  const int part = first_of_part<Tile>();
  for (int index = blockIdx.x / Tile::kBlocks; index < schedule.jobs(); index = next_job(index)) {
    RowJob job = schedule(index);
    const int end_tile = job.first_tile + job.tiles, column_head = job.head / p.shape.group;
    const auto strip = [&] {
      if constexpr (kSkips) return scores.strip_of_rows(job.batch, job.head, job.row0, Tile::kRows);
    };
    // The first tile from this one on that holds a score by the block mask.
    const auto held = [&](int tile) {
      if constexpr (kSkips)
        return strip().template next<Tile::kColumns>(tile, end_tile);
      else
        return tile;
    };
    if constexpr (kSkips) job.first_tile = held(job.first_tile), job.tiles = end_tile - job.first_tile;
    const auto box = [&](int tile) { return arch::Box{part, tile * Tile::kColumns, column_head, job.batch}; };
    // Loads a tile of columns. Returns the tile that follows it.
    const auto load_columns = [&](int tile) {
      TileStep step{held(tile + 1), false};
      if constexpr (kSkips) step.whole = strip().template whole<Tile::kColumns>(tile);
      arch::Mbarrier* const arrived = memory.column_ring.acquire(column_at, Operand::kBytes, [&] {
        if constexpr (kSkips) memory.steps[column_at.stage] = step;
      });
      memory.columns[column_at.stage].load(p.columns, box(tile), arrived);
      column_at.advance();
      return step.next;
    };
    // The first columns come before the rows, whose buffers are in use until the last job ends.
    int tile = job.first_tile, next = end_tile;
    if (job.tiles > 0) next = load_columns(tile);
#pragma unroll 1
    for (int w = 0; w < Tile::kConsumers; ++w, row_at.advance()) {
      arch::Mbarrier* const arrived = memory.row_ring.acquire(row_at, Operand::kBytes, [&] {
        memory.job[w] = job;
        memory.whole[w] = kept_by_all(p.shape, job, w * kFragmentRows);
      });
      memory.rows[w].load(p.rows, {part, job.row0 + w * kFragmentRows, job.head, job.batch}, arrived);
    }
    // The columns of a tile come before the payload of the tile before it, as consumers read them (kAhead).
#pragma unroll 1
    while (tile < end_tile) {
      const int second = next < end_tile ? load_columns(next) : end_tile;
      memory.payload[payload_at.stage].load(p.payload, box(tile),
                                            memory.payload_ring.acquire(payload_at, Operand::kBytes));
      payload_at.advance();
      tile = next, next = second;
    }
  }
#pragma unroll 1
  for (int w = 0; w < Tile::kConsumers; ++w, row_at.advance())
    memory.row_ring.acquire(row_at, 0, [&] { memory.job[w].tiles = -1; });
}

template <class S, class M>
concept PlanesScores = FragmentScores<S, M> || kBiasedInMemory<S> || kOfPrograms<S>;

// A consumer warpgroup: folds its 64 rows of one job after another.
template <class Tile, TileMonoid M, PlanesScores<M> Scores, PayloadRows<M> Rows>
struct PlanesConsumer {
  using R = typename M::Real;
  static constexpr int kColumns = Tile::kColumns, kWidth = Tile::kWidth;
  // Whether the scores of the next tile are multiplied during the fold. Their product takes kWidth / 2 registers. The fold needs
  // these for biases of scores, a softcap or a function, and would spill 124 to 160 bytes.
  static constexpr bool kAhead = requires { requires Scores::kMonotone; };

  const M& m;
  const Scores& scores_of;
  const FoldShape& shape;
  PlanesMemory<Tile>& memory;
  const int warpgroup;
  RingPosition<Tile::kConsumers> row_at{warpgroup, 0};
  RingPosition<Tile::kStages> at{};  // of the tile that is folded
  PartialDotsOf<Tile> partial_dots{};

  float scores[kColumns / 2];
  float sums[kWidth / 2];
  typename M::State state[2];

  __device__ __forceinline__ const RowJob& receive() {
    memory.row_ring.wait(row_at);
    return memory.job[warpgroup];
  }
  __device__ __forceinline__ void release_rows() {
    memory.row_ring.release(row_at);
    row_at.parity ^= 1;
  }

  // scores = rows . columns^T, of the product of a stage, which has ended.
  __device__ __forceinline__ void take_scores(PlaneDots<kWidth>& dots, RingPosition<Tile::kStages> of) {
    const RowScale* const of_rows = memory.rows[warpgroup].scales;
    dots.scaled(scores, {of_rows[fragment_row(0)].scale, of_rows[fragment_row(1)].scale},
                memory.columns[of.stage].scales);
    memory.column_ring.release(of);
    if constexpr (Tile::kBlocks > 1) partial_dots.add(scores, memory.partial_dots, warpgroup);
  }

  __device__ __forceinline__ decltype(auto) scores_of_tile(const RowJob& job, int tile) const {
    const int row0 = job.row_of(warpgroup * kFragmentRows), column0 = tile * kColumns;
    if constexpr (kOfPrograms<Scores>)
      return scores_of.folded(job.batch, job.head, row0, column0);
    else
      return folded_with_biases<kColumns / 2>(scores_of, job.batch, job.head, row0, column0);
  }

  // Replaces the scores of a tile by the payload's weights. A tile's mass is summed by itself, so that no
  // mass is a long sequential sum. scores_here: of this tile. scale: by which the payload's sums so far must
  // be multiplied.
  template <FragmentScores<M> ScoresHere>
  __device__ __forceinline__ void fold(const ScoresHere& scores_here, const RowJob& job, int tile,
                                       R (&scale)[2]) {
    typename M::State of_tile[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) of_tile[r] = m.reframe(m.identity(), m.frame_of(state[r]));
    const bool whole = memory.whole[warpgroup].have(tile * kColumns, kColumns);
    fold_rows(m, of_tile, scores, scores_here, shape, job, warpgroup * kFragmentRows, tile * kColumns, whole,
              scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) state[r] = m.add(m.reframe(state[r], m.frame_of(of_tile[r])), of_tile[r]);
  }

  // Folds all column tiles of a job. Afterwards `state` has all columns of the rows.
  __device__ __forceinline__ void run(const RowJob& job) {
#pragma unroll
    for (int r = 0; r < 2; ++r) state[r] = m.identity();
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    PlaneDots<kWidth> dots;
    int tile = job.first_tile;
    const int end_tile = job.first_tile + job.tiles;
    [[maybe_unused]] TileStep step;  // of the tile multiplied last
    // Issues the product of the rows and a tile of columns.
    const auto multiply_columns = [&](RingPosition<Tile::kStages> of) {
      memory.column_ring.wait(of);
      if constexpr (SkipsBlocks<Scores>) step = memory.steps[of.stage];
      dots.multiply(memory.rows[warpgroup], memory.columns[of.stage]);
    };
    const auto after = [&](int tile) {
      if constexpr (SkipsBlocks<Scores>)
        return step.next;
      else
        return tile + 1;
    };
    if (kAhead && tile < end_tile) {
      multiply_columns(at);
      arch::wait_wgmma<0>();
      take_scores(dots, at);
    }
#pragma unroll 1
    while (tile < end_tile) {
      RingPosition<Tile::kStages> next = at;
      next.advance();
      const bool is_last = tile + 1 == end_tile;
      auto&& scores_here = scores_of_tile(job, tile);
      if constexpr (kAhead) {
        // The last tile has no next one. The rows are then multiplied by themselves, and nobody reads the result: around wgmma
        // whose sums stay in flight, a branch would make the compiler wait for them.
        if (!is_last) memory.column_ring.wait(next);
        dots.multiply(memory.rows[warpgroup], is_last ? memory.rows[warpgroup] : memory.columns[next.stage]);
      } else {
        multiply_columns(at);
        if constexpr (kOfPrograms<Scores>) scores_here.find_kept(step.whole);
        arch::wait_wgmma<0>();
        take_scores(dots, at);
      }
      R scale[2];
      fold(scores_here, job, tile, scale);
      PlaneWeights weights;
      memory.payload_ring.wait(at);
      weights.split(scores, memory.payload[at.stage].scales);
      if constexpr (kAhead) {
        arch::wait_wgmma<0>();
        if (!is_last) take_scores(dots, next);
      }

      // sums = scale sums + weights . payload
      PlaneSums<kWidth> of_tile;
      of_tile.multiply(weights, memory.payload[at.stage]);
      rescale_fragment<M>(sums, scale);
      arch::wait_wgmma<0>();
      memory.payload_ring.release(at);
      at = next;
      of_tile.add_to(sums, weights);
      tile = after(tile);
    }
    join_lanes(m, state);
    keep_sums(scores_of, sums);
  }

  // All results that are not finite are marked (repair.cuh): the planes of an infinity or NaN spoil more than
  // it would.
  __device__ __forceinline__ void store(const RowJob& job, const Rows& rows, const OutputRows& out) {
    const int first = warpgroup * kFragmentRows;
    end_rows(m, state, sums, shape, job, first, rows);
    if constexpr (Tile::kBlocks == 1) {
      finish_states(m, state, sums, true, shape, job, first, rows);
      store_sums<float>(sums, shape, job, first, out, out.data);
    } else {
      // A row is marked if either block has sums of it that are not finite.
      float probe[kColumns / 2] = {};
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) probe[2 * row_of_element(i)] += sums[i] * 0.f;
      partial_dots.add(probe, memory.partial_dots, warpgroup);
      const int block = arch::cluster_rank();
      if (block == 0) finish_states(m, state, probe, true, shape, job, first, rows);
      OutputRows part = out;
      part.width -= block * kWidth;
      store_sums<float>(sums, shape, job, first, part, static_cast<float*>(out.data) + block * kWidth);
    }
  }
};

template <class Tile, class M, class Scores, class Rows>
__global__ void __cluster_dims__(Tile::kBlocks) __launch_bounds__(Tile::kThreads, 1)
    fold_forward_planes_kernel(const __grid_constant__ PlanesArguments p, const __grid_constant__ M m,
                               const __grid_constant__ Scores scores, const __grid_constant__ Rows rows) {
  extern __shared__ unsigned char shared_bytes[];
  using Worker = PlanesConsumer<Tile, M, Scores, Rows>;
  using Schedule = RowSchedule<Tile::kRows, Tile::kColumns>;
  auto& memory = *reinterpret_cast<PlanesMemory<Tile>*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) memory.init();
  sync_cluster<Tile>();

  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == Tile::kConsumers) {
    arch::setmaxnreg_dec<Tile::kConsumers == 2 ? 24 : 32>();
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect())
      produce_planes(p, Schedule{p.shape, p.counter}, scores, memory);
  } else {
    arch::setmaxnreg_inc<Tile::kConsumers == 2 ? 240 : 160>();
    Worker consumer{m, scores, p.shape, memory, warpgroup};
    while (true) {
      const RowJob& job = consumer.receive();
      if (job.tiles < 0) break;
      consumer.run(job);
      consumer.store(job, rows, p.out);
      consumer.release_rows();
    }
  }
}

}  // namespace monoidreduce::sm90
