// The forward fold on Hopper, for widths up to 256: a tile of rows stays in shared memory, columns and
// payload stream.
//
//   scores = rows . columns^T    from shared memory              fold: scores become weights, in registers
//   sums  += weights . payload   weights from registers
//
// The kernel is warp-specialized and persistent. A producer warpgroup loads by TMA; the consumer warpgroups
// own 64 rows each. A consumer multiplies the scores of the next tile while it folds this one. Consumers
// alternate (ping-pong): one multiplies while another folds.
//
// This continues from one job to the next. Each consumer has its own buffer for its rows, so one may finish
// its rows while another begins the next job. Results are stored through the buffer of the rows.
#pragma once

#include "monoidreduce/device/arch/warpgroup.cuh"
#include "monoidreduce/device/block/bias_tile.cuh"
#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/block/ring.cuh"
#include "monoidreduce/device/resident/row_fragment.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"

namespace monoidreduce::sm90 {

// The widths are rounded up to whole slabs. Registers of a consumer's thread: kPayloadWidth / 2 for sums,
// kColumns / 2 for scores and kColumns / 4 for weights, out of 255 (one consumer), 240 (two) or 160 (three).
// kTransposed: the payload is [payload width, columns] in memory.
template <int kWidth_, int kPayloadWidth_, int kColumns_, int kConsumers_, int kStages_,
          bool kTransposed_ = false>
struct ForwardTile {
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kWidth = kWidth_, kPayloadWidth = kPayloadWidth_, kColumns = kColumns_;
  static constexpr int kConsumers = kConsumers_, kStages = kStages_;
  static constexpr int kRows = kFragmentRows * kConsumers;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
};

template <class T>
concept ForwardTiling = requires {
  (T::kWidth, T::kPayloadWidth, T::kRows, T::kColumns, T::kTransposed, T::kConsumers, T::kStages,
   T::kThreads);
};

// Shapes as in FoldProblem and FoldOutput (fold.h).
struct ForwardArguments {
  arch::TensorMap rows, columns, payload;  // boxes: a consumer's, kColumns, kColumns or kPayloadWidth lines
  arch::TensorMap rounded;                 // out; boxes of a warp's lines
  OutputRows out;
  unsigned long long* counter;  // RowSchedule::counter
  FoldShape shape;
  BiasSource bias;  // boxes of a consumer's lines; or nothing
};

template <class Tile>
using PayloadTile =
    std::conditional_t<Tile::kTransposed,
                       SharedTile<Tile::kPayloadWidth, (Tile::kColumns + kSlab - 1) / kSlab * kSlab>,
                       SharedTile<Tile::kColumns, Tile::kPayloadWidth>>;

inline constexpr int kWarpRows = kFragmentRows / 4;

// B: the element type of score biases that come in tiles, or void. kSkips: a block mask skips tiles.
template <class Tile, class B, bool kSkips, class Job_>
struct alignas(kSharedAlignment) ForwardMemory {
  using Job = Job_;
  using Rows = SharedTile<kFragmentRows, Tile::kWidth>;
  static_assert(Tile::kPayloadWidth <= Tile::kWidth);  // results fit in the rows' buffer
  static constexpr int kStreamed =
      Tile::kStages * (SharedTile<Tile::kColumns, Tile::kWidth>::kBytes + PayloadTile<Tile>::kBytes);
  // Buffers for a consumer's rows: two if they fit, so that the rows of the next job are loaded while those
  // of this job are in use.
  static constexpr int kRowBuffers = std::is_void_v<B> && Tile::kConsumers > 1 &&
                                             kStreamed + 2 * Tile::kConsumers* Rows::kBytes <= kSharedBytes
                                         ? 2
                                         : 1;
  static constexpr int kRowStages = kRowBuffers * Tile::kConsumers;
  static constexpr int kOperands = kRowStages * Rows::kBytes + kStreamed;

  unsigned char rows[kRowStages][Rows::kBytes];
  unsigned char columns[Tile::kStages][SharedTile<Tile::kColumns, Tile::kWidth>::kBytes];
  unsigned char payload[Tile::kStages][PayloadTile<Tile>::kBytes];
  [[no_unique_address]] BiasRings<B, Tile::kConsumers, kFragmentRows, Tile::kColumns, kOperands> biases;
  // The job of the rows in each buffer; tiles < 0: there are no more jobs.
  Job job[kRowStages];
  Columns whole[kRowStages];                    // the columns that all rows in a buffer keep
  Ring<kRowStages, ReadBy::kThreads> row_ring;  // stages belong to the consumers in turn
  Ring<Tile::kStages, kSkips ? ReadBy::kThreads : ReadBy::kProducts> column_ring;
  Ring<Tile::kStages, ReadBy::kProducts> payload_ring;
  TileStep steps[Tile::kStages];  // with a block mask: one for each stage of columns

  // Called by one thread before any other uses the memory.
  __device__ __forceinline__ void init() {
    row_ring.init(1);
    column_ring.init(Tile::kConsumers);
    payload_ring.init(Tile::kConsumers);
    biases.init();
    arch::fence_init();
  }
};

// The producer: loads the tiles of every job of the block. Called by one thread.
template <class Tile, class B, class Schedule, class Scores>
__device__ __forceinline__ void produce(
    const ForwardArguments& p, const Schedule& schedule, const Scores& scores,
    ForwardMemory<Tile, B, SkipsBlocks<Scores>, typename Schedule::Job>& memory) {
  constexpr bool kSkips = SkipsBlocks<Scores>;
  using Memory = ForwardMemory<Tile, B, kSkips, typename Schedule::Job>;
  using RowsTile = typename Memory::Rows;
  using ColumnsTile = SharedTile<Tile::kColumns, Tile::kWidth>;
  RingPosition<Memory::kRowStages> row_at;
  RingPosition<Tile::kStages> at;
  typename decltype(memory.biases)::Position bias_at;
  int index = blockIdx.x;
  for (; index < schedule.jobs(); index = schedule.next(index)) {
    auto job = schedule(index);
    const int end_tile = job.first_tile + job.tiles;
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
    const int column_head = job.head / p.shape.group;
    // Loads a tile of columns and of payload. Returns the tile that follows it.
    const auto load_columns = [&](int tile) {
      TileStep step{held(tile + 1), false};
      const arch::Box box{0, tile * Tile::kColumns, column_head, job.batch};
      if constexpr (kSkips) step.whole = strip().template whole<Tile::kColumns>(tile);
      arch::Mbarrier* const arrived = memory.column_ring.acquire(at, ColumnsTile::kBytes, [&] {
        if constexpr (kSkips) memory.steps[at.stage] = step;
      });
      ColumnsTile{memory.columns[at.stage]}.load(p.columns, box, arrived);
      if constexpr (!std::is_void_v<B>) {
        memory.biases.load(p.bias, bias_at, [&](int w) {
          return arch::Box{box.row, job.row0 + w * kFragmentRows, job.head, job.batch};
        });
      }
      const arch::Box payload_box = Tile::kTransposed ? arch::Box{box.row, 0, column_head, job.batch} : box;
      PayloadTile<Tile>{memory.payload[at.stage]}.load(
          p.payload, payload_box, memory.payload_ring.acquire(at, PayloadTile<Tile>::kBytes));
      at.advance();
      return step.next;
    };
    const auto load_rows = [&] {
      constexpr int kBytesOfLine = RowsTile::kBytes / kFragmentRows;
#pragma unroll 1
      for (int w = 0; w < Tile::kConsumers; ++w, row_at.advance()) {
        RowsTile{memory.rows[row_at.stage]}.load(
            p.rows, {0, job.row0 + w * kFragmentRows, job.head, job.batch},
            memory.row_ring.acquire(row_at, kBytesOfLine * (schedule.lines() / Tile::kConsumers), [&] {
              memory.job[row_at.stage] = job;
              memory.whole[row_at.stage] = kept_by_all(p.shape, job, w * kFragmentRows);
            }));
      }
    };
    // Loads in the order in which buffers become free. With a second buffer the rows come first. Otherwise
    // the first columns do, because the rows' buffer is in use until the last job's result is stored.
    int tile = job.first_tile;
    if constexpr (Memory::kRowBuffers == 1) {
      if (job.tiles > 0) tile = load_columns(tile);
    }
    load_rows();
#pragma unroll 1
    while (tile < end_tile) tile = load_columns(tile);
  }
#pragma unroll 1
  for (int w = 0; w < Tile::kConsumers; ++w, row_at.advance())
    memory.row_ring.acquire(row_at, 0, [&] { memory.job[row_at.stage].tiles = -1; });
}

template <class S, class M>
concept ForwardScores = FragmentScores<S, M> || ScoresWithTiles<S> || (SkipsBlocks<S> && ScoresOfHeads<S, M>);

// A consumer warpgroup: folds its 64 rows of one job after another.
template <class E, ForwardTiling Tile, TileMonoid M, ForwardScores<M> Scores, PayloadRows<M> Rows, class Job>
struct Consumer {
  using R = typename M::Real;
  static constexpr int kColumns = Tile::kColumns, kPayloadWidth = Tile::kPayloadWidth;
  static constexpr int kPingPong = 1;  // named barrier kPingPong + w lets consumer w issue its products
  using Memory = ForwardMemory<Tile, BiasElement<Scores>, SkipsBlocks<Scores>, Job>;
  using BiasPosition = typename decltype(Memory::biases)::Position;

  const M& m;
  const Scores& scores_of;
  const FoldShape& shape;
  Memory& memory;
  const int warpgroup;
  RingPosition<Memory::kRowStages> row_at{warpgroup, 0};
  RingPosition<Tile::kStages> at{};
  BiasPosition bias_at{};
  TileStep step{};  // with a block mask: of the tile multiplied last

  float scores[kColumns / 2];
  float sums[kPayloadWidth / 2];
  std::uint32_t weights[kColumns / 4];
  typename M::State state[2];
  R scale[2];

  // Waits for the next job and its rows.
  __device__ __forceinline__ Job receive() {
    memory.row_ring.wait(row_at);
    return memory.job[row_at.stage];
  }
  // Called by each warp when it no longer needs the rows and their buffer: frees the buffer.
  __device__ __forceinline__ void release_rows() {
    if (arch::elect()) arch::wait_stores_read<0>();
    memory.row_ring.release(row_at);
    for (int w = 0; w < Tile::kConsumers; ++w) row_at.advance();
  }

  // scores = rows . columns^T; asynchronous.
  __device__ __forceinline__ void multiply_scores() {
    const AlongWidth<kFragmentRows> rows(arch::shared_address(memory.rows[row_at.stage]));
    const AlongWidth<kColumns> columns(arch::shared_address(memory.columns[at.stage]));
    memory.column_ring.wait(at);
    if constexpr (SkipsBlocks<Scores>) step = memory.steps[at.stage];
    arch::pin(scores);
    arch::fence_wgmma();
#pragma unroll
    for (int k = 0; k < Tile::kWidth / kProductDepth; ++k)
      arch::Wgmma<E, kColumns>::template shared<false, false>(scores, rows[k], columns[k], k > 0);
    arch::commit_wgmma();
  }
  // sums += weights . payload; asynchronous.
  __device__ __forceinline__ void multiply_payload(RingPosition<Tile::kStages> at) {
    using Operand = std::conditional_t<Tile::kTransposed, AlongWidth<kPayloadWidth>, AlongRows<kColumns>>;
    const Operand payload(arch::shared_address(memory.payload[at.stage]));
    memory.payload_ring.wait(at);
    arch::pin(sums);
    arch::fence_wgmma();
#pragma unroll
    for (int k = 0; k < kColumns / kProductDepth; ++k)
      arch::Wgmma<E, kPayloadWidth>::template registers<!Tile::kTransposed>(sums, &weights[4 * k], payload[k],
                                                                            true);
    arch::commit_wgmma();
  }

  // The scores of a tile that is being multiplied. What does not depend on the products, the mask, is
  // computed meanwhile.
  __device__ __forceinline__ decltype(auto) scores_of_tile(const Job& job, int tile) const {
    if constexpr (SkipsBlocks<Scores>)
      return scores_of.template of_tile<kColumns>(job.batch, job.head, job.row0 + warpgroup * kFragmentRows,
                                                  tile * kColumns, step.whole);
    else
      return (scores_of);
  }
  // Whether all rows of this consumer keep all columns of a tile.
  __device__ __forceinline__ bool is_whole(int tile) const {
    return memory.whole[row_at.stage].have(tile * kColumns, kColumns);
  }
  template <class TileScores>
  __device__ __forceinline__ void fold(const Job& job, int tile, const TileScores& scores_of, bool whole) {
    arch::pin(scores);
    const auto fold = [&](const auto& scores_of) {
      fold_rows(m, state, scores, scores_of, shape, job, warpgroup * kFragmentRows, tile * kColumns, whole,
                scale);
    };
    if constexpr (kBiasedByTile<Scores>) {
      using Biases = typename decltype(Memory::biases)::Tile::OfRows;
      fold(scores_of.folded(Biases(memory.biases.wait(warpgroup, bias_at), scores_of.rows_share)));
      memory.biases.release(warpgroup, bias_at);
    } else {
      fold(scores_of);
    }
  }
  // The tile after the one whose scores were multiplied last.
  __device__ __forceinline__ int after(int tile) const {
    if constexpr (SkipsBlocks<Scores>)
      return step.next;
    else
      return tile + 1;
  }
  // Ping-pong: a consumer issues its products when the one before has issued its own. A single consumer has
  // nobody to alternate with.
  __device__ __forceinline__ void wait_ping_pong() {
    if constexpr (Tile::kConsumers > 1) arch::sync_threads(kPingPong + warpgroup, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void end_ping_pong() {
    if constexpr (Tile::kConsumers > 1)
      arch::arrive_threads(kPingPong + (warpgroup + 1) % Tile::kConsumers, 2 * kWarpgroup);
  }

  // Folds all column tiles of a job. Afterwards `state` has all columns of the rows.
  __device__ __forceinline__ void run(const Job& job) {
#pragma unroll
    for (int r = 0; r < 2; ++r) state[r] = m.identity(), scale[r] = R(1);
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    if (job.tiles == 0) return;

    wait_ping_pong();
    multiply_scores();
    end_ping_pong();
    const auto& first_scores = scores_of_tile(job, job.first_tile);
    const bool first_whole = is_whole(job.first_tile);
    arch::wait_wgmma<0>();
    memory.column_ring.release(at);
    fold(job, job.first_tile, first_scores, first_whole);
    round_fragment<E>(weights, scores);
#pragma unroll 1
    for (int tile = after(job.first_tile); tile < job.first_tile + job.tiles; tile = after(tile)) {
      const RingPosition<Tile::kStages> before = at;
      at.advance();
      wait_ping_pong();
      multiply_scores();
      multiply_payload(before);
      end_ping_pong();
      const auto& tile_scores = scores_of_tile(job, tile);
      const bool whole = is_whole(tile);
      arch::wait_wgmma<1>();
      memory.column_ring.release(at);
      fold(job, tile, tile_scores, whole);
      arch::wait_wgmma<0>();
      arch::pin(sums);
      memory.payload_ring.release(before);
      rescale_fragment<M>(sums, scale);
      round_fragment<E>(weights, scores);
    }
    multiply_payload(at);
    join_lanes(m, state);
    arch::wait_wgmma<0>();
    arch::pin(sums);
    memory.payload_ring.release(at);
    at.advance();
    keep_sums(scores_of, sums);
  }

  // Stores the result of a job through the rows' buffer. Only the warp itself reads its lines there, so warps
  // do not wait for each other.
  __device__ __forceinline__ void store(const Rows& rows, const ForwardArguments& p) {
    end_rows(m, state, sums, shape, memory.job[row_at.stage], warpgroup * kFragmentRows, rows);
    const Job job = memory.job[row_at.stage];  // read again, like `first`: before, registers are few
    const int first = warpgroup * kFragmentRows;
    unsigned char* const place = memory.rows[row_at.stage];
#pragma unroll
    for (int slab = 0; slab < kPayloadWidth / kSlab; ++slab) {
      std::uint32_t rounded[kSlabElements / 2];
      round_fragment<E>(rounded,
                        reinterpret_cast<const float (&)[kSlabElements]>(sums[slab * kSlabElements]));
      store_fragment<kFragmentRows>(
          arch::shared_address(place) + slab * SharedTile<kFragmentRows, kSlab>::kBytes, 0, rounded);
    }
    arch::fence_async_shared();
    __syncwarp();
    if (arch::elect()) {
      const int line = fragment_row(0) / kWarpRows * kWarpRows;
#pragma unroll
      for (int slab = 0; slab < kPayloadWidth / kSlab; ++slab) {
        arch::store(p.rounded, {slab * kSlab, job.row0 + first + line, job.head, job.batch},
                    place + (slab * kFragmentRows + line) * kLineBytes);
      }
      arch::commit_stores();
    }
    finish_states(m, state, sums, shape.partial(), shape, job, first, rows);
    store_low_words<E, Rows>(sums, shape, job, first, p.out);
  }
};

template <class E, class Tile, class M, class Scores, class Rows>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fold_forward_kernel(const __grid_constant__ ForwardArguments p, const __grid_constant__ M m,
                        const __grid_constant__ Scores scores, const __grid_constant__ Rows rows) {
  extern __shared__ unsigned char shared_bytes[];
  using Worker = Consumer<E, Tile, M, Scores, Rows, RowJob>;
  using Schedule = RowSchedule<Tile::kRows, Tile::kColumns>;
  auto& memory = *reinterpret_cast<typename Worker::Memory*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) memory.init();
  __syncthreads();

  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == Tile::kConsumers) {
    arch::setmaxnreg_dec<Tile::kConsumers == 2 ? 24 : 32>();
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect())
      produce(p, Schedule{p.shape, p.counter}, scores, memory);
  } else {
    arch::setmaxnreg_inc<Tile::kConsumers == 2 ? 240 : 160>();
    const auto consume = [&](const FoldShape& shape) {
      Worker consumer{m, scores, shape, memory, warpgroup};
      if (warpgroup == Tile::kConsumers - 1) arch::arrive_threads(Worker::kPingPong, 2 * kWarpgroup);
      while (true) {
        const RowJob job = consumer.receive();
        if (job.tiles < 0) break;
        consumer.run(job);
        consumer.store(rows, p);
        consumer.release_rows();
      }
    };
    if constexpr (kBiasedByTile<Scores> || !kMayBeListed<Scores>)
      consume(p.shape.without_spans());
    else
      consume(p.shape);
  }
}

}  // namespace monoidreduce::sm90
