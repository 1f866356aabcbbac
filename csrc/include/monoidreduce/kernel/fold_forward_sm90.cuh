// The forward fold on Hopper for widths that fit: a tile of rows stays in shared memory, columns and payload stream.
//
//   scores = rows . columns^T    from shared memory              fold: scores become weights, in registers
//   sums  += weights . payload   weights from registers
//
// One warpgroup loads (the copy engine does the work), the others each own 64 rows. A consumer multiplies the scores
// of the next tile while it folds this one, and the consumers take turns: one multiplies while another folds. That goes
// on from one job to the next, for which each consumer has its rows in a place of its own: one finishes its rows while
// another begins.
#pragma once

#include "monoidreduce/arch/warpgroup.cuh"
#include "monoidreduce/block/bias_tile.cuh"
#include "monoidreduce/block/fold_fragment.cuh"
#include "monoidreduce/block/ring.cuh"
#include "monoidreduce/kernel/row_fragment.cuh"
#include "monoidreduce/kernel/schedule.cuh"
#include "monoidreduce/kernel/tensor_map.cuh"
#include "monoidreduce/operators.h"

namespace monoidreduce::sm90 {

// Rows and columns of a tile, widths rounded up to whole slabs. Registers of a consumer's thread: kPayloadWidth / 2 of
// sums, kColumns / 2 of scores and kColumns / 4 of weights, out of 255 (one consumer), 240 (two) or 160 (three).
// kTransposed: does the payload lie with its columns adjacent, [payload width, columns].
template <int kWidth_, int kPayloadWidth_, int kColumns_, int kConsumers_, int kStages_,
          bool kTransposed_ = false>
struct ForwardTile {
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kWidth = kWidth_, kPayloadWidth = kPayloadWidth_, kColumns = kColumns_;
  static constexpr int kConsumers = kConsumers_, kStages = kStages_;
  static constexpr int kRows = kFragmentRows * kConsumers;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
};

struct ForwardArguments {
  arch::TensorMap rows, columns, payload;  // boxes: a consumer's, kColumns, kColumns or kPayloadWidth lines
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

// B: element type of the biases of scores, or void.
template <class Tile, class B>
struct alignas(kSharedAlignment) ForwardMemory {
  using Rows = SharedTile<kFragmentRows, Tile::kWidth>;
  static constexpr int kOperands =
      Tile::kConsumers * Rows::kBytes +
      Tile::kStages * (SharedTile<Tile::kColumns, Tile::kWidth>::kBytes + PayloadTile<Tile>::kBytes);

  unsigned char rows[Tile::kConsumers][Rows::kBytes];
  unsigned char columns[Tile::kStages][SharedTile<Tile::kColumns, Tile::kWidth>::kBytes];
  unsigned char payload[Tile::kStages][PayloadTile<Tile>::kBytes];
  [[no_unique_address]] BiasRings<B, Tile::kConsumers, kFragmentRows, Tile::kColumns, kOperands> biases;
  int job[Tile::kConsumers];        // whose rows are there, or the number of jobs: there are no more
  Ring<Tile::kConsumers> row_ring;  // a stage a consumer
  Ring<Tile::kStages> column_ring, payload_ring;

  // By one thread, before any other uses it.
  __device__ __forceinline__ void init() {
    row_ring.init(1);
    column_ring.init(Tile::kConsumers);
    payload_ring.init(Tile::kConsumers);
    biases.init();
    arch::fence_init();
  }
};

// Loads the tiles of every job of the block. One thread.
template <class Tile, class B, class Schedule>
__device__ __forceinline__ void produce(const ForwardArguments& p, const Schedule& schedule,
                                        ForwardMemory<Tile, B>& memory) {
  using RowsTile = typename ForwardMemory<Tile, B>::Rows;
  using ColumnsTile = SharedTile<Tile::kColumns, Tile::kWidth>;
  RingPosition<Tile::kConsumers> row_at;
  RingPosition<Tile::kStages> at;
  typename decltype(memory.biases)::Position bias_at;
  int index = blockIdx.x;
  for (; index < schedule.jobs(); index = schedule.next(index)) {
    const auto job = schedule(index);
    const int column_head = job.head / p.shape.group;
    const auto load_columns = [&](int tile) {
      const arch::Box box{0, tile * Tile::kColumns, column_head, job.batch};
      ColumnsTile{memory.columns[at.stage]}.load(p.columns, box,
                                                 memory.column_ring.acquire(at, ColumnsTile::kBytes));
      if constexpr (!std::is_void_v<B>) {
        memory.biases.load(p.bias, bias_at, [&](int w) {
          return arch::Box{box.row, job.row0 + w * kFragmentRows, job.head, job.batch};
        });
      }
      const arch::Box payload_box = Tile::kTransposed ? arch::Box{box.row, 0, column_head, job.batch} : box;
      PayloadTile<Tile>{memory.payload[at.stage]}.load(
          p.payload, payload_box, memory.payload_ring.acquire(at, PayloadTile<Tile>::kBytes));
      at.advance();
    };
    // The first tile of columns before the rows: those wait for the last job's last product of scores.
    if (job.tiles > 0) load_columns(job.first_tile);
    constexpr int kBytesOfLine = RowsTile::kBytes / kFragmentRows;
#pragma unroll 1
    for (int w = 0; w < Tile::kConsumers; ++w, row_at.advance()) {
      RowsTile{memory.rows[w]}.load(
          p.rows, {0, job.row0 + w * kFragmentRows, job.head, job.batch},
          memory.row_ring.acquire(row_at, kBytesOfLine * (schedule.lines() / Tile::kConsumers),
                                  [&] { memory.job[w] = index; }));
    }
#pragma unroll 1
    for (int tile = 1; tile < job.tiles; ++tile) load_columns(job.first_tile + tile);
  }
#pragma unroll 1
  for (int w = 0; w < Tile::kConsumers; ++w, row_at.advance())
    memory.row_ring.acquire(row_at, 0, [&] { memory.job[w] = index; });
}

// A consumer's rows of one job.
template <class E, class Tile, PayloadMonoid M, class Scores>
struct Consumer {
  using R = typename M::Real;
  static constexpr int kColumns = Tile::kColumns, kPayloadWidth = Tile::kPayloadWidth;
  static constexpr int kTurn = 1;  // named barrier kTurn + w lets consumer w issue its products
  static constexpr int kTogether = kTurn + Tile::kConsumers;  // kTogether + w: of all threads of consumer w
  using Memory = ForwardMemory<Tile, BiasElement<Scores>>;
  using BiasPosition = typename decltype(Memory::biases)::Position;

  const M& m;
  const Scores& scores_of;
  const FoldShape& shape;
  Memory& memory;
  const int warpgroup;

  float scores[kColumns / 2];
  float sums[kPayloadWidth / 2];
  std::uint32_t weights[kColumns / 4];
  typename M::State state[2];
  R scale[2];

  __device__ __forceinline__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }

  // scores = rows . columns^T; asynchronous.
  __device__ __forceinline__ void multiply_scores(RingPosition<Tile::kStages> at) {
    const AlongWidth<kFragmentRows> rows(arch::shared_address(memory.rows[warpgroup]));
    const AlongWidth<kColumns> columns(arch::shared_address(memory.columns[at.stage]));
    memory.column_ring.wait(at);
    arch::pin(scores);
    arch::fence_products();
#pragma unroll
    for (int k = 0; k < Tile::kWidth / kProductDepth; ++k)
      arch::Wgmma<E, kColumns>::template shared<false, false>(scores, rows[k], columns[k], k > 0);
    arch::commit_products();
  }
  // sums += weights . payload; asynchronous.
  __device__ __forceinline__ void multiply_payload(RingPosition<Tile::kStages> at) {
    using Operand = std::conditional_t<Tile::kTransposed, AlongWidth<kPayloadWidth>, AlongRows<kColumns>>;
    const Operand payload(arch::shared_address(memory.payload[at.stage]));
    memory.payload_ring.wait(at);
    arch::pin(sums);
    arch::fence_products();
#pragma unroll
    for (int k = 0; k < kColumns / kProductDepth; ++k)
      arch::Wgmma<E, kPayloadWidth>::template registers<!Tile::kTransposed>(sums, &weights[4 * k], payload[k],
                                                                            true);
    arch::commit_products();
  }

  template <class Job>
  __device__ __forceinline__ void fold(const Job& job, int tile, BiasPosition& bias_at) {
    arch::pin(scores);
    const auto fold = [&](const auto& scores_of) {
      fold_rows(m, state, scores, scores_of, shape, job, warpgroup * kFragmentRows, tile * kColumns, scale);
    };
    if constexpr (kBiasedByTile<Scores>) {
      using Biases = typename decltype(Memory::biases)::Tile::OfRows;
      fold(scores_of.folded(Biases(memory.biases.wait(warpgroup, bias_at), scores_of.rows_share)));
      memory.biases.release(warpgroup, bias_at);
    } else {
      fold(scores_of);
    }
  }
  // A consumer alone has no turns to take.
  __device__ __forceinline__ void wait_turn() {
    if constexpr (Tile::kConsumers > 1) arch::sync_threads(kTurn + warpgroup, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void end_turn() {
    if constexpr (Tile::kConsumers > 1)
      arch::arrive_threads(kTurn + (warpgroup + 1) % Tile::kConsumers, 2 * kWarpgroup);
  }

  // All column tiles of a job, from positions at and bias_at on.
  template <class Job>
  __device__ __forceinline__ void run(const Job& job, RingPosition<Tile::kStages>& at,
                                      BiasPosition& bias_at) {
#pragma unroll
    for (int r = 0; r < 2; ++r) state[r] = m.identity(), scale[r] = R(1);
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    if (job.tiles == 0) {
      // Nothing else keeps the warps together here, and what job it is stands in memory until the release.
      arch::sync_threads(kTogether + warpgroup, kWarpgroup);
      if (leads()) memory.row_ring.release({warpgroup});
      return;
    }

    wait_turn();
    multiply_scores(at);
    end_turn();
    arch::wait_products<0>();
    if (leads()) memory.column_ring.release(at);
    fold(job, job.first_tile, bias_at);
    round_fragment<E>(weights, scores);
#pragma unroll 1
    for (int tile = job.first_tile + 1; tile < job.first_tile + job.tiles; ++tile) {
      const RingPosition<Tile::kStages> before = at;
      at.advance();
      wait_turn();
      multiply_scores(at);
      multiply_payload(before);
      end_turn();
      arch::wait_products<1>();
      if (leads()) memory.column_ring.release(at);
      fold(job, tile, bias_at);
      arch::wait_products<0>();
      arch::pin(sums);
      if (leads()) memory.payload_ring.release(before);
      rescale_fragment<M>(sums, scale);
      round_fragment<E>(weights, scores);
    }
    if (leads()) memory.row_ring.release({warpgroup});  // the next job's rows may come
    multiply_payload(at);
    arch::wait_products<0>();
    arch::pin(sums);
    if (leads()) memory.payload_ring.release(at);
    at.advance();
  }
};

// Rows: as finish_rows (row_fragment.cuh) takes them.
template <class E, class Tile, PayloadMonoid M, class Scores, class Rows>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fold_forward_kernel(const __grid_constant__ ForwardArguments p, const __grid_constant__ M m,
                        const __grid_constant__ Scores scores, const __grid_constant__ Rows rows) {
  extern __shared__ unsigned char shared_bytes[];
  using Worker = Consumer<E, Tile, M, Scores>;
  using Schedule = RowSchedule<Tile::kRows, Tile::kColumns>;
  auto& memory = *reinterpret_cast<typename Worker::Memory*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) memory.init();
  __syncthreads();

  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == Tile::kConsumers) {
    arch::release_registers<Tile::kConsumers == 2 ? 24 : 32>();
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect()) produce(p, Schedule{p.shape, p.counter}, memory);
  } else {
    arch::take_registers<Tile::kConsumers == 2 ? 240 : 160>();
    Worker consumer{m, scores, p.shape, memory, warpgroup};
    const Schedule schedule{p.shape, p.counter};
    RingPosition<Tile::kConsumers> row_at{warpgroup, 0};
    RingPosition<Tile::kStages> at;
    typename Worker::BiasPosition bias_at;
    if (warpgroup == Tile::kConsumers - 1) arch::arrive_threads(Worker::kTurn, 2 * kWarpgroup);
    while (true) {
      memory.row_ring.wait(row_at);
      const int index = memory.job[warpgroup];
      if (index >= schedule.jobs()) break;
      const RowJob job = schedule(index);
      consumer.run(job, at, bias_at);
      row_at.parity ^= 1;
      finish_rows<E>(m, consumer.state, consumer.sums, p.shape, job, warpgroup * kFragmentRows, rows, p.out);
    }
  }
}

// counter: for rows that keep different numbers of columns, else null. Cleared here.
template <class E, class Tile, PayloadMonoid M, class Scores, class Rows>
void fold_forward(const M& m, const Scores& scores, const FoldProblem& p, const Rows& rows,
                  const TensorView& out, unsigned long long* counter, const Launch& launch) {
  const std::int64_t row_tiles = (p.rows() + Tile::kRows - 1) / Tile::kRows, heads = p.batch() * p.heads();
  const FoldShape shape(p, section_of(p, p.columns() * (p.width() + p.payload_width()) * sizeof(E),
                                      p.heads() / p.column_heads()));
  const ForwardArguments arguments{
      .rows = tensor_map(p.a, kFragmentRows),
      .columns = tensor_map(p.b, Tile::kColumns),
      .payload = Tile::kTransposed ? tensor_map(transposed_rows(p.payload), Tile::kPayloadWidth)
                                   : tensor_map(p.payload, Tile::kColumns),
      .out = OutputRows(out),
      .counter = counter,
      .shape = shape,
      .bias = bias_source<BiasElement<Scores>>(p.bias, kFragmentRows)};
  const DeviceGuard device(p.a.cuda_device);
  if (counter)
    check_cuda(cudaMemsetAsync(counter, 0, sizeof *counter, static_cast<cudaStream_t>(launch.stream)),
               "cudaMemsetAsync");
  launch_kernel(
      "fold_forward_sm90", &fold_forward_kernel<E, Tile, M, Scores, Rows>,
      static_cast<unsigned>(std::min<std::int64_t>(heads * row_tiles, multiprocessors(p.a.cuda_device))),
      Tile::kThreads, sizeof(ForwardMemory<Tile, BiasElement<Scores>>) + kSharedAlignment, launch.stream,
      arguments, m, scores, rows);
}

}  // namespace monoidreduce::sm90
