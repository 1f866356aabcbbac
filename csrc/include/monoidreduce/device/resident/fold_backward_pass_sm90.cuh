// Gradients of a fold with a payload on Hopper, each in a pass of its own over the scores. This serves widths
// for which the registers do not hold all gradients together, calls that want only the rows' gradient, and the
// gradient of the rows in the MLP's deterministic mode. The lines whose gradient is computed stay in shared
// memory; the others stream.
//
// One launch has the blocks of all passes, one pass behind the other: a pass of few blocks leaves
// multiprocessors idle.
//
//   gradient of   stays                streams                  scores = first . first^T    sum += pulled . streamed
//   rows          rows, grad_out       columns, payload         u = second . second^T       dz      . columns
//   columns       columns, payload     rows, grad_out           u = second . second^T       dz      . rows
//   payload       columns              rows, grad_out                                       weights . grad_out
//
// Two consumer warpgroups each own 64 of the lines that stay; a producer warpgroup loads. A gradient has a
// single writer, so its bits are the same in every run. The consumers alternate (ping-pong): one issues its
// products, the last of this tile and the first of the next, while the other computes the VJP. (H100, an MLP
// of 16384 rows and units, width 256, three passes: 1506 us; 1627 us if each product is waited for.)
#pragma once

#include "monoidreduce/device/arch/warpgroup.cuh"
#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/device/block/pull_fragment.cuh"
#include "monoidreduce/device/block/ring.cuh"
#include "monoidreduce/device/resident/row_residuals.cuh"
#include "monoidreduce/device/resident/unmasked.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"

namespace monoidreduce::sm90 {

enum class GradientOf { kRows, kColumns, kPayload };

constexpr int kThreadsOfPass = 3 * kWarpgroup;  // two consumers and a producer

// kWidth: the width of rows and of the payload, rounded up to whole slabs. kTransposed: the payload and its
// gradient are [payload width, columns] in memory. Registers of a consumer's thread: kWidth / 2 for sums,
// kStreamed / 2 each for scores and u, kStreamed / 4 for the left operand of the sums.
template <GradientOf kOf_, int kWidth_, bool kTransposed_>
struct PassTile {
  static constexpr GradientOf kOf = kOf_;
  static constexpr bool kOfRows = kOf == GradientOf::kRows, kOfPayload = kOf == GradientOf::kPayload;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kStreamed = 64;  // lines of a tile; with 128, rows of width 128 take 2.57, not 2.40 ms
  static constexpr int kConsumers = 2, kStaying = kFragmentRows * kConsumers;
  static constexpr int kThreads = kThreadsOfPass;
  // Tiles of both streams that are in flight. If there is space for only three, the tile of the second stream
  // is loaded first. Its stage is the first to be free again, and takes the next tile of the first stream.
  static constexpr int kStages = kWidth > 192 && !kOfPayload ? 3 : 4;
};

template <class T>
concept PassTiling = requires {
  (T::kOf, T::kWidth, T::kStaying, T::kStreamed, T::kTransposed, T::kConsumers, T::kStages, T::kThreads);
};

// Operands by the table above; shapes as in FoldProblem and FoldGradients (fold.h).
struct PassArguments {
  int blocks;  // 0: nobody wants this gradient
  // A payload that is transposed has boxes of kWidth lines, below too.
  arch::TensorMap staying[2];   // boxes of kStaying lines
  arch::TensorMap streamed[2];  // boxes of kStreamed lines
  arch::TensorMap gradient;     // boxes of 64 lines
  float* d_column_bias;         // [columns], written by the pass of the columns; or null
  RowResiduals residuals;
  RowMarks marks;
  FoldShape shape;
};

template <class Tile>
struct alignas(kSharedAlignment) PassMemory {
  using StayingTile = SharedTile<Tile::kStaying, Tile::kWidth>;
  using StreamedTile = SharedTile<Tile::kStreamed, Tile::kWidth>;
  // Staying operands besides the first.
  static constexpr int kOthers = Tile::kOfPayload ? 0 : 1;
  // Whether the second staying operand, or the second streamed one, is a transposed payload.
  static constexpr bool kStayingTransposed = Tile::kTransposed && Tile::kOf == GradientOf::kColumns;
  static constexpr bool kStreamedTransposed = Tile::kTransposed && Tile::kOfRows;
  using OtherStayingTile =
      std::conditional_t<kStayingTransposed, SharedTile<Tile::kWidth, Tile::kStaying>, StayingTile>;
  using SecondStreamedTile =
      std::conditional_t<kStreamedTransposed, SharedTile<Tile::kWidth, Tile::kStreamed>, StreamedTile>;

  unsigned char staying[1 + kOthers][StayingTile::kBytes];  // the first holds the gradient at the end
  unsigned char streamed[Tile::kStages][StreamedTile::kBytes];
  // Of the rows that stream: P_i (log-sum-exp), and RowPolicy::upstream (centre).
  float product[Tile::kStages][Tile::kStreamed], upstream[Tile::kStages][Tile::kStreamed];
  // Threads read the values above, if rows stream.
  Ring<Tile::kStages, Tile::kOfRows ? ReadBy::kProducts : ReadBy::kThreads> ring;
  arch::Mbarrier stayed;
};

// The work of one block. One tile of lines stays, and the tiles of every query head of its group stream past
// it (of one head, if rows stay).
template <class Tile>
struct PassJob {
  int batch, staying_head, line0;
  int first_head, end_head, first_tile, end_tile;

  __device__ __forceinline__ PassJob(const FoldShape& shape, int index) {
    if constexpr (Tile::kOfRows) {
      const RowJob job = RowSchedule<Tile::kStaying, Tile::kStreamed>{shape}(index);
      batch = job.batch, staying_head = job.head, line0 = job.row0;
      first_head = job.head / shape.group, end_head = first_head + 1;
      first_tile = job.first_tile, end_tile = job.first_tile + job.tiles;
    } else {
      const ColumnJob job = column_job<Tile::kStreamed, Tile::kStaying>(shape, index);
      batch = job.batch, staying_head = job.column_head, line0 = job.column0;
      first_head = job.column_head * shape.group, end_head = first_head + shape.group;
      first_tile = job.first_tile, end_tile = job.first_tile + job.tiles;
    }
  }
};

// The producer: loads the tiles of the job. Called by one thread.
template <bool kResiduals, class Tile>
__device__ __forceinline__ void produce(const PassArguments& p, const PassJob<Tile>& job,
                                        PassMemory<Tile>& memory) {
  using Memory = PassMemory<Tile>;
  using StayingTile = typename Memory::StayingTile;
  using StreamedTile = typename Memory::StreamedTile;
  constexpr bool kRowsStream = kResiduals && !Tile::kOfRows;
  constexpr int kValueBytes = kRowsStream ? Tile::kStreamed * sizeof(float) : 0;
  arch::arrive_expect(&memory.stayed, (1 + Memory::kOthers) * StayingTile::kBytes);
  const arch::Box staying{0, job.line0, job.staying_head, job.batch};
  StayingTile{memory.staying[0]}.load(p.staying[0], staying, &memory.stayed);
  if constexpr (!Tile::kOfPayload) {
    const arch::Box other =
        Memory::kStayingTransposed ? arch::Box{job.line0, 0, job.staying_head, job.batch} : staying;
    typename Memory::OtherStayingTile{memory.staying[1]}.load(p.staying[1], other, &memory.stayed);
  }
  RingPosition<Tile::kStages> at;
  for (int head = job.first_head; head < job.end_head; ++head) {
    const std::int64_t values = (std::int64_t{job.batch} * p.shape.heads + head) * p.residuals.padded_rows;
#pragma unroll 1
    for (int tile = job.first_tile; tile < job.end_tile; ++tile) {
      const int line = tile * Tile::kStreamed;
      const arch::Box box{0, line, head, job.batch};
      const auto load_first = [&] {
        arch::Mbarrier* arrived = memory.ring.acquire(at, StreamedTile::kBytes + 2 * kValueBytes);
        StreamedTile{memory.streamed[at.stage]}.load(p.streamed[0], box, arrived);
        if constexpr (kRowsStream) {
          arch::load(memory.product[at.stage], p.residuals.product + values + line, kValueBytes, arrived);
          arch::load(memory.upstream[at.stage], p.residuals.upstream + values + line, kValueBytes, arrived);
        }
        at.advance();
      };
      const auto load_second = [&] {
        const arch::Box second_box = Memory::kStreamedTransposed ? arch::Box{line, 0, head, job.batch} : box;
        typename Memory::SecondStreamedTile{memory.streamed[at.stage]}.load(
            p.streamed[1], second_box, memory.ring.acquire(at, StreamedTile::kBytes));
        at.advance();
      };
      if constexpr (Tile::kOfPayload) {
        load_first(), load_second();
      } else {
        load_second(), load_first();
      }
    }
  }
}

// Scores of all passes: a fragment's lines are rows in the pass of the rows, columns in the others.
template <class S, class M>
concept PassScores = FragmentScores<S, M> && TransposedScores<S, M>;

template <class E, PassTiling Tile, TileMonoid M, PassScores<M> Scores>
struct PassConsumer {
  using R = typename M::Real;
  static constexpr int kWidth = Tile::kWidth, kStreamed = Tile::kStreamed;
  static constexpr bool kResiduals = !std::is_empty_v<typename M::Frame>;
  using Memory = PassMemory<Tile>;
  using Position = RingPosition<Tile::kStages>;
  static constexpr int kBothConsumers = 1, kOneConsumer = 2;  // named barriers
  static constexpr int kPingPong = 4;  // kPingPong + w lets consumer w issue its products

  const M& m;
  const Scores& scores_of;
  const PassArguments& p;
  const PassJob<Tile>& job;
  Memory& memory;
  // The number of this consumer; every lane of a warp must call it.
  __device__ __forceinline__ static int warpgroup() { return arch::uniform(threadIdx.x / kWarpgroup); }

  float scores[kStreamed / 2], u[kStreamed / 2], sums[kWidth / 2];
  std::uint32_t pulled[kStreamed / 4];
  float own_product[2], own_upstream[2];  // of the rows that stay: P_i, and RowPolicy::upstream
  float d_bias[2] = {0.f, 0.f};           // of the columns that stay, if wanted

  __device__ __forceinline__ int own_line() const { return job.line0 + warpgroup() * kFragmentRows; }

  // product = this consumer's staying lines . streamed^T
  template <bool kLeftTransposed, bool kRightTransposed>
  __device__ __forceinline__ void multiply(float (&product)[kStreamed / 2], const unsigned char* staying,
                                           const unsigned char* streamed) {
    using Left = std::conditional_t<kLeftTransposed, AlongRows<kWidth>, AlongWidth<Tile::kStaying>>;
    using Right = std::conditional_t<kRightTransposed, AlongRows<kWidth>, AlongWidth<kStreamed>>;
    const int own = warpgroup() * (kLeftTransposed ? kWidth : kFragmentRows) * kLineBytes;
    const Left left(arch::shared_address(staying) + own);
    const Right right(arch::shared_address(streamed));
    arch::pin(product);
    arch::fence_wgmma();
#pragma unroll
    for (int k = 0; k < kWidth / kProductDepth; ++k)
      arch::Wgmma<E, kStreamed>::template shared<kLeftTransposed, kRightTransposed>(product, left[k],
                                                                                    right[k], k > 0);
  }
  // Both products are asynchronous and form one group each.
  __device__ __forceinline__ void multiply_scores(Position first) {
    memory.ring.wait(first);
    multiply<false, false>(scores, memory.staying[0], memory.streamed[first.stage]);
    arch::commit_wgmma();
  }
  __device__ __forceinline__ void multiply_u(Position second) {
    memory.ring.wait(second);
    multiply<Memory::kStayingTransposed, Memory::kStreamedTransposed>(u, memory.staying[1],
                                                                      memory.streamed[second.stage]);
    arch::commit_wgmma();
  }
  // sums += pulled . streamed; asynchronous, one group.
  __device__ __forceinline__ void accumulate(Position at) {
    const AlongRows<kStreamed> right(arch::shared_address(memory.streamed[at.stage]));
    arch::pin(sums);
    arch::fence_wgmma();
#pragma unroll
    for (int k = 0; k < kStreamed / kProductDepth; ++k)
      arch::Wgmma<E, kWidth>::template registers<true>(sums, &pulled[4 * k], right[k], true);
    arch::commit_wgmma();
  }

  // Replaces scores and u by weights and dz, the derivative with respect to the dot product.
  __device__ __forceinline__ void pull_tile(Position first, int line) {
    arch::pin(scores);
    if constexpr (Tile::kOfPayload) {
#pragma unroll
      for (float& x : u) x = 0.f;
    } else {
      arch::pin(u);
    }
    const float *product = memory.product[first.stage] + fragment_column(0),
                *upstream = memory.upstream[first.stage] + fragment_column(0);
    const auto residual = [&](int i) {
      if constexpr (!kResiduals) {
        return RowResidual<M>{};
      } else if constexpr (Tile::kOfRows) {
        const int r = row_of_element(i);
        return RowResidual<M>{{R(own_product[r]), R(0)}, R(own_upstream[r])};
      } else {
        const int row = i / 4 * 8 + i % 2;
        return RowResidual<M>{{R(product[row]), R(0)}, R(upstream[row])};
      }
    };
    const FoldShape& shape = p.shape;
    Kept kept[2];
    bool full;
    if constexpr (Tile::kOfRows) {
      scores_of.prepare(scores, own_line(), line);
      full = shape.keeps_all(own_line(), kFragmentRows, line, kStreamed);
      if (!full) find_unmasked_columns(kept, shape, [&](int of) { return own_line() + of; }, line);
    } else {
      scores_of.prepare_transposed(scores, line, own_line());
      full = shape.keeps_all(line, kStreamed, own_line(), kFragmentRows);
      if (!full) find_unmasked_rows(kept, shape, line, own_line());
    }
    pull_fragment(m, scores_of, residual, scores, u);
    if (!full) clear_fragment(kept, Tile::kOfPayload ? scores : u);
    scores_of.finish_transposed(scores, u, line, own_line());
    if (Tile::kOf == GradientOf::kColumns && p.d_column_bias) {
#pragma unroll
      for (int i = 0; i < kStreamed / 2; ++i) d_bias[row_of_element(i)] += u[i];
    }
  }

  __device__ __forceinline__ void wait_ping_pong() const {
    arch::sync_threads(kPingPong + warpgroup(), 2 * kWarpgroup);
  }
  __device__ __forceinline__ void end_ping_pong() const {
    arch::arrive_threads(kPingPong + (warpgroup() + 1) % Tile::kConsumers, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    const int tiles = (job.end_tile - job.first_tile) * (job.end_head - job.first_head);
    arch::wait(&memory.stayed, 0);
    if (tiles <= 0) return;
    if constexpr (Tile::kOfRows && kResiduals) {
      const std::int64_t values =
          (std::int64_t{job.batch} * p.shape.heads + job.staying_head) * p.residuals.padded_rows + own_line();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        own_product[r] = p.residuals.product[values + fragment_row(r)];
        own_upstream[r] = p.residuals.upstream[values + fragment_row(r)];
      }
    }
    if (warpgroup() == Tile::kConsumers - 1) arch::arrive_threads(kPingPong, 2 * kWarpgroup);
    if constexpr (Tile::kOfPayload) {
      sum_weights(tiles);
    } else {
      sum_dz(tiles);
    }
  }

  // A tile's weights are summed while the scores of the next are multiplied: its pull begins before the sums
  // are done.
  __device__ __forceinline__ void sum_weights(int tiles) {
    Position at;
    int tile = job.first_tile;
    wait_ping_pong();
    multiply_scores(at);
    end_ping_pong();
    arch::wait_wgmma<0>();
    pull_tile(at, tile * kStreamed);
    memory.ring.release(at);
    round_fragment<E>(pulled, scores);
#pragma unroll 1
    for (int n = 1; n < tiles; ++n) {
      at.advance();
      const Position summed = at;
      at.advance();
      if (++tile == job.end_tile) tile = job.first_tile;
      wait_ping_pong();
      multiply_scores(at);
      memory.ring.wait(summed);
      accumulate(summed);
      end_ping_pong();
      arch::wait_wgmma<1>();
      pull_tile(at, tile * kStreamed);
      memory.ring.release(at);
      arch::wait_wgmma<0>();
      arch::pin(sums);
      memory.ring.release(summed);
      round_fragment<E>(pulled, scores);
    }
    at.advance();
    memory.ring.wait(at);
    accumulate(at);
    arch::wait_wgmma<0>();
    arch::pin(sums);
  }

  // A tile's dz is summed, and the products of the next tile follow: a pull beside both has not enough
  // registers.
  __device__ __forceinline__ void sum_dz(int tiles) {
    Position at, summed;
    int tile = job.first_tile;
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait_ping_pong();
      if (n > 0) accumulate(summed);
      const Position second = at;
      multiply_u(second);
      at.advance();
      multiply_scores(at);
      end_ping_pong();
      arch::wait_wgmma<2>();
      if (n > 0) memory.ring.release(summed);
      arch::wait_wgmma<1>();
      memory.ring.release(second);
      arch::wait_wgmma<0>();
      arch::pin(sums);
      pull_tile(at, tile * kStreamed);
      round_fragment<E>(pulled, u);
      summed = at;
      at.advance();
      if (++tile == job.end_tile) tile = job.first_tile;
    }
    accumulate(summed);
    arch::wait_wgmma<0>();
    arch::pin(sums);
  }

  // Stores the gradient of this consumer's lines through the shared memory of the staying tile, which nobody
  // else reads there.
  __device__ __forceinline__ void finish() {
    const int own = warpgroup() * kFragmentRows, line = job.line0 + own;
    if (p.shape.partial() && !is_finite(sums)) {
      if constexpr (Tile::kOfRows) {
        if (line < p.shape.rows)
          p.marks.row(std::int64_t{job.batch} * p.shape.heads + job.staying_head, line) = 1.f;
      } else {
        const int column_heads = p.shape.heads / p.shape.group;
        if (line < p.shape.columns)
          p.marks.column(std::int64_t{job.batch} * column_heads + job.staying_head, line) = 1.f;
      }
    }
    constexpr bool kTransposed = Tile::kTransposed && Tile::kOfPayload;
    std::uint32_t rounded[kWidth / 4];
    round_fragment<E>(rounded, sums);
    const int own_slab = own * kWidth / kFragmentRows * kLineBytes;  // of the transposed gradient
    if constexpr (kTransposed) {
      arch::sync_threads(kBothConsumers, 2 * kWarpgroup);  // it spans the other consumer's lines
      store_fragment_transposed(arch::shared_address(memory.staying[0]) + own_slab, rounded);
    } else {
      store_fragment<Tile::kStaying>(arch::shared_address(memory.staying[0]), own, rounded);
    }
    if (Tile::kOf == GradientOf::kColumns && p.d_column_bias) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = reduce_lanes<kLanesOfRow>(d_bias[r], [](float a, float b) { return a + b; });
        const int column = line + fragment_row(r);
        if (threadIdx.x % kLanesOfRow == 0 && column < p.shape.columns) p.d_column_bias[column] = sum;
      }
    }
    arch::fence_async_shared();
    arch::sync_threads(kOneConsumer + warpgroup(), kWarpgroup);
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect()) {
      if constexpr (kTransposed) {
        arch::store(p.gradient, {line, 0, job.staying_head, job.batch}, memory.staying[0] + own_slab);
      } else {
        for (int slab = 0; slab < kWidth / kSlab; ++slab) {
          const int offset = (slab * Tile::kStaying + own) * kLineBytes;
          arch::store(p.gradient, {slab * kSlab, line, job.staying_head, job.batch},
                      memory.staying[0] + offset);
        }
      }
      arch::commit_stores();
      arch::wait_stores_read<0>();
    }
  }
};

// A block of a pass. index: among the blocks of this pass.
template <class E, class Tile, class M, class Scores>
__device__ __forceinline__ void run_pass(const PassArguments& p, int index, const M& m,
                                         const Scores& scores) {
  extern __shared__ unsigned char shared_bytes[];
  using Consumer = PassConsumer<E, Tile, M, Scores>;
  auto& memory = *reinterpret_cast<typename Consumer::Memory*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) {
    memory.ring.init(Tile::kConsumers);
    arch::init(&memory.stayed, 1);
    arch::fence_init();
  }
  __syncthreads();

  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  // A job in each branch: one for both would be live through the producer's few registers, and be spilled.
  if (warpgroup == Tile::kConsumers) {
    arch::setmaxnreg_dec<24>();
    const PassJob<Tile> job(p.shape, index);
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect()) produce<Consumer::kResiduals>(p, job, memory);
  } else {
    arch::setmaxnreg_inc<240>();
    const PassJob<Tile> job(p.shape, index);
    Consumer consumer{m, scores, p, job, memory};
    consumer.run();
    consumer.finish();
  }
}

template <class... Tiles>
struct PassesArguments {
  PassArguments passes[sizeof...(Tiles)];
};

// A block of pass kPass or of a later one. index: among the blocks of all these.
template <class E, int kPass, class Tile, class... Later, class M, class Scores>
__device__ __forceinline__ void run_one_of(const PassArguments* passes, int index, const M& m,
                                           const Scores& scores) {
  const PassArguments& own = passes[kPass];
  if (index < own.blocks)
    run_pass<E, Tile>(own, index, m, scores);
  else if constexpr (sizeof...(Later) > 0)
    run_one_of<E, kPass + 1, Later...>(passes, index - own.blocks, m, scores);
}

template <class E, class M, class Scores, class... Tiles>
__global__ void __launch_bounds__(kThreadsOfPass, 1)
    fold_backward_pass_kernel(const __grid_constant__ PassesArguments<Tiles...> p,
                              const __grid_constant__ M m, const __grid_constant__ Scores scores) {
  run_one_of<E, 0, Tiles...>(p.passes, blockIdx.x, m, scores);
}

}  // namespace monoidreduce::sm90
