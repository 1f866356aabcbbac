// One gradient of a fold with a payload on Hopper, by a pass of its own: for widths whose gradients do not fit into
// registers together, and where sums must have one order. What the gradient is of stays, what it is summed over streams.
//
//   gradient of   stays                streams                  scores = first . first^T    sum += pulled . streamed
//   rows          rows, grad_out       columns, payload         u = second . second^T       dz      . columns
//   columns       columns, payload     rows, grad_out           u = second . second^T       dz      . rows
//   payload       columns              rows, grad_out                                       weights . grad_out
//
// Two warpgroups each own 64 of the lines that stay; a third loads. While one of the two pulls, the other's products keep
// the tensor cores busy. Nobody else adds to a gradient: it is written once, and its bits are the same in every run.
#pragma once

#include "monoidreduce/arch/warpgroup.cuh"
#include "monoidreduce/block/bias_tile.cuh"
#include "monoidreduce/block/fold_fragment.cuh"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/block/pull_fragment.cuh"
#include "monoidreduce/block/ring.cuh"
#include "monoidreduce/kernel/kept.cuh"
#include "monoidreduce/kernel/row_residuals.cuh"
#include "monoidreduce/kernel/schedule.cuh"
#include "monoidreduce/kernel/tensor_map.cuh"
#include "monoidreduce/operators.h"

namespace monoidreduce::sm90 {

enum class GradientOf { kRows, kColumns, kPayload };

// Width of rows and of the payload, rounded up to whole slabs. kTransposed: do the payload and its gradient lie with their
// columns adjacent, [payload width, columns]. Registers of a consumer's thread: kWidth / 2 of sums, kStreamed / 2 each of
// scores and of u, kStreamed / 4 of what is summed.
template <GradientOf kOf_, int kWidth_, bool kTransposed_>
struct PassTile {
  static constexpr GradientOf kOf = kOf_;
  static constexpr bool kOfRows = kOf == GradientOf::kRows, kOfPayload = kOf == GradientOf::kPayload;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kStreamed =
      64;  // lines of a tile; of 128, the rows of d128 took 2.57 ms instead of 2.40
  static constexpr int kConsumers = 2, kStaying = kFragmentRows * kConsumers;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  // Tiles in flight: two, but of the second where there is not the space.
  static constexpr int kFirstStages = 2, kSecondStages = kWidth > 128 && !kOfPayload ? 1 : 2;
};

struct PassArguments {
  arch::TensorMap staying[2];   // boxes of kStaying lines; a transposed payload's, here and below, of kWidth
  arch::TensorMap streamed[2];  // boxes of kStreamed lines
  arch::TensorMap gradient;     // boxes of 64 lines
  float* d_column_bias;         // [columns], written by the pass of the columns; or null
  RowResiduals residuals;
  RowMarks marks;
  FoldShape shape;
  BiasSource bias;  // boxes of a consumer's lines; or nothing
};

// B: element type of the biases of scores, or void.
template <class Tile, class B>
struct alignas(kSharedAlignment) PassMemory {
  static_assert(Tile::kOfRows || std::is_void_v<B>);
  using StayingTile = SharedTile<Tile::kStaying, Tile::kWidth>;
  using StreamedTile = SharedTile<Tile::kStreamed, Tile::kWidth>;
  static constexpr int kOthers = Tile::kOfPayload ? 0 : 1;
  // Is the second of what stays, or streams, a transposed payload.
  static constexpr bool kStayingTransposed = Tile::kTransposed && Tile::kOf == GradientOf::kColumns;
  static constexpr bool kStreamedTransposed = Tile::kTransposed && Tile::kOfRows;
  using OtherStayingTile =
      std::conditional_t<kStayingTransposed, SharedTile<Tile::kWidth, Tile::kStaying>, StayingTile>;
  using SecondStreamedTile =
      std::conditional_t<kStreamedTransposed, SharedTile<Tile::kWidth, Tile::kStreamed>, StreamedTile>;

  unsigned char staying[1 + kOthers][StayingTile::kBytes];  // the first, in the end, is the gradient
  unsigned char first[Tile::kFirstStages][StreamedTile::kBytes];
  unsigned char second[Tile::kSecondStages][StreamedTile::kBytes];
  static constexpr int kOperands =
      (1 + kOthers) * StayingTile::kBytes + (Tile::kFirstStages + Tile::kSecondStages) * StreamedTile::kBytes;
  [[no_unique_address]] BiasRings<B, Tile::kConsumers, kFragmentRows, Tile::kStreamed, kOperands> biases;
  float product[Tile::kFirstStages][Tile::kStreamed],
      upstream[Tile::kFirstStages][Tile::kStreamed];  // of rows
  Ring<Tile::kFirstStages> first_ring;
  Ring<Tile::kSecondStages> second_ring;
  arch::Mbarrier stayed;
};

// What a block does: one tile of lines that stay, and the tiles that stream past them for every head of the group (one
// head, where the rows stay).
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
      const ColumnJob<Tile::kStreamed, Tile::kStaying> job(shape, index);
      batch = job.batch, staying_head = job.column_head, line0 = job.column0;
      first_head = job.column_head * shape.group, end_head = first_head + shape.group;
      first_tile = job.first_tile, end_tile = job.first_tile + job.tiles;
    }
  }
};

template <bool kResiduals, class Tile, class B>
__device__ __forceinline__ void produce(const PassArguments& p, const PassJob<Tile>& job,
                                        PassMemory<Tile, B>& memory) {
  using Memory = PassMemory<Tile, B>;
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
  RingPosition<Tile::kFirstStages> first;
  RingPosition<Tile::kSecondStages> second;
  typename decltype(memory.biases)::Position bias_at;
  for (int head = job.first_head; head < job.end_head; ++head) {
    const std::int64_t values = (std::int64_t{job.batch} * p.shape.heads + head) * p.residuals.padded_rows;
#pragma unroll 1
    for (int tile = job.first_tile; tile < job.end_tile; ++tile) {
      const int line = tile * Tile::kStreamed;
      const arch::Box box{0, line, head, job.batch};
      arch::Mbarrier* arrived = memory.first_ring.acquire(first, StreamedTile::kBytes + 2 * kValueBytes);
      StreamedTile{memory.first[first.stage]}.load(p.streamed[0], box, arrived);
      if constexpr (kRowsStream) {
        arch::load(memory.product[first.stage], p.residuals.product + values + line, kValueBytes, arrived);
        arch::load(memory.upstream[first.stage], p.residuals.upstream + values + line, kValueBytes, arrived);
      }
      const arch::Box second_box = Memory::kStreamedTransposed ? arch::Box{line, 0, head, job.batch} : box;
      typename Memory::SecondStreamedTile{memory.second[second.stage]}.load(
          p.streamed[1], second_box, memory.second_ring.acquire(second, StreamedTile::kBytes));
      if constexpr (!std::is_void_v<B>) {
        memory.biases.load(p.bias, bias_at, [&](int w) {
          return arch::Box{line, job.line0 + w * kFragmentRows, job.staying_head, job.batch};
        });
      }
      first.advance();
      second.advance();
    }
  }
}

template <class E, class Tile, PayloadMonoid M, class Scores>
struct PassConsumer {
  using R = typename M::Real;
  static constexpr int kWidth = Tile::kWidth, kStreamed = Tile::kStreamed;
  static constexpr bool kResiduals = !std::is_empty_v<typename M::Frame>;
  using Memory = PassMemory<Tile, BiasElement<Scores>>;

  const M& m;
  const Scores& scores_of;
  const PassArguments& p;
  const PassJob<Tile>& job;
  Memory& memory;
  const int warpgroup;

  float scores[kStreamed / 2], u[kStreamed / 2], sums[kWidth / 2];
  std::uint32_t pulled[kStreamed / 4];
  float own_product[2], own_upstream[2];  // of the rows that stay
  float d_bias[2] = {0.f, 0.f};           // of the columns that stay, where it is wanted
  typename decltype(Memory::biases)::Position bias_at;

  __device__ __forceinline__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }
  __device__ __forceinline__ int own_line() const { return job.line0 + warpgroup * kFragmentRows; }

  // product = own lines of what stays . streamed^T
  template <bool kLeftTransposed, bool kRightTransposed>
  __device__ __forceinline__ void multiply(float (&product)[kStreamed / 2], const unsigned char* staying,
                                           const unsigned char* streamed) {
    using Left = std::conditional_t<kLeftTransposed, AlongRows<kWidth>, AlongWidth<Tile::kStaying>>;
    using Right = std::conditional_t<kRightTransposed, AlongRows<kWidth>, AlongWidth<kStreamed>>;
    const int own = warpgroup * (kLeftTransposed ? kWidth : kFragmentRows) * kLineBytes;
    const Left left(arch::shared_address(staying) + own);
    const Right right(arch::shared_address(streamed));
    arch::pin(product);
    arch::fence_products();
#pragma unroll
    for (int k = 0; k < kWidth / kProductDepth; ++k)
      arch::Wgmma<E, kStreamed>::template shared<kLeftTransposed, kRightTransposed>(product, left[k],
                                                                                    right[k], k > 0);
  }
  // scores and u of a tile; asynchronous, one group.
  __device__ __forceinline__ void multiply_scores(RingPosition<Tile::kFirstStages> first,
                                                  RingPosition<Tile::kSecondStages> second) {
    memory.first_ring.wait(first);
    multiply<false, false>(scores, memory.staying[0], memory.first[first.stage]);
    if constexpr (!Tile::kOfPayload) {
      memory.second_ring.wait(second);
      multiply<Memory::kStayingTransposed, Memory::kStreamedTransposed>(u, memory.staying[1],
                                                                        memory.second[second.stage]);
    }
    arch::commit_products();
  }
  // sums += pulled . streamed; asynchronous, one group.
  __device__ __forceinline__ void accumulate(RingPosition<Tile::kFirstStages> first,
                                             RingPosition<Tile::kSecondStages> second) {
    if constexpr (Tile::kOfPayload) memory.second_ring.wait(second);
    const AlongRows<kStreamed> right(
        arch::shared_address(Tile::kOfPayload ? memory.second[second.stage] : memory.first[first.stage]));
    arch::pin(sums);
    arch::fence_products();
#pragma unroll
    for (int k = 0; k < kStreamed / kProductDepth; ++k)
      arch::Wgmma<E, kWidth>::template registers<true>(sums, &pulled[4 * k], right[k], true);
    arch::commit_products();
  }

  // Scores and u become weights and dz.
  __device__ __forceinline__ void pull_tile(RingPosition<Tile::kFirstStages> first, int line) {
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
    const auto pull = [&](const auto& scores_of) {
      Kept kept[2];
      bool full;
      if constexpr (Tile::kOfRows) {
        scores_of.prepare(scores, own_line(), line);
        full = shape.keeps_all(own_line(), kFragmentRows, line, kStreamed);
        if (!full) find_kept_columns(kept, shape, [&](int of) { return own_line() + of; }, line);
      } else {
        scores_of.prepare_transposed(scores, line, own_line());
        full = shape.keeps_all(line, kStreamed, own_line(), kFragmentRows);
        if (!full) find_kept_rows(kept, shape, line, own_line());
      }
      pull_fragment(m, scores_of, residual, scores, u);
      if (!full) clear_fragment(kept, Tile::kOfPayload ? scores : u);
      scores_of.finish_transposed(scores, u, line, own_line());
    };
    if constexpr (kBiasedByTile<Scores>) {
      using Biases = typename decltype(Memory::biases)::Tile::OfRows;
      pull(scores_of.pulled(Biases(memory.biases.wait(warpgroup, bias_at), scores_of.rows_share)));
      memory.biases.release(warpgroup, bias_at);
    } else {
      pull(scores_of);
    }
    float (&gradient)[kStreamed / 2] = Tile::kOfPayload ? scores : u;
    if (Tile::kOf == GradientOf::kColumns && p.d_column_bias) {
#pragma unroll
      for (int i = 0; i < kStreamed / 2; ++i) d_bias[row_of_element(i)] += u[i];
    }
    round_fragment<E>(pulled, gradient);
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

    RingPosition<Tile::kFirstStages> first;
    RingPosition<Tile::kSecondStages> second;
    int tile = job.first_tile;
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      multiply_scores(first, second);
      arch::wait_products<0>();
      if (!Tile::kOfPayload && leads()) memory.second_ring.release(second);
      pull_tile(first, tile * kStreamed);
      if (Tile::kOfPayload && leads()) memory.first_ring.release(first);
      accumulate(first, second);
      arch::wait_products<0>();
      arch::pin(sums);
      if (leads()) {
        if constexpr (Tile::kOfPayload) {
          memory.second_ring.release(second);
        } else {
          memory.first_ring.release(first);
        }
      }
      if (++tile == job.end_tile) tile = job.first_tile;
      first.advance();
      second.advance();
    }
  }

  // The gradient of the own lines, through the tile of what stays: nobody else reads them.
  __device__ __forceinline__ void finish() {
    if (p.shape.partial() && !is_finite(sums)) {
      if constexpr (Tile::kOfRows) {
        if (own_line() < p.shape.rows)
          p.marks.row(std::int64_t{job.batch} * p.shape.heads + job.staying_head, own_line()) = 1.f;
      } else {
        const int column_heads = p.shape.heads / p.shape.group;
        if (own_line() < p.shape.columns)
          p.marks.column(std::int64_t{job.batch} * column_heads + job.staying_head, own_line()) = 1.f;
      }
    }
    constexpr bool kTransposed = Tile::kTransposed && Tile::kOfPayload;
    constexpr int kBothConsumers = 1, kOneConsumer = 2;  // named barriers
    std::uint32_t rounded[kWidth / 4];
    round_fragment<E>(rounded, sums);
    const int own_slab = warpgroup * kWidth * kLineBytes;  // of the transposed gradient
    if constexpr (kTransposed) {
      arch::sync_threads(kBothConsumers, 2 * kWarpgroup);  // it lies across the other consumer's lines
      store_fragment_transposed(arch::shared_address(memory.staying[0]) + own_slab, rounded);
    } else {
      store_fragment<Tile::kStaying>(arch::shared_address(memory.staying[0]), warpgroup * kFragmentRows,
                                     rounded);
    }
    if (Tile::kOf == GradientOf::kColumns && p.d_column_bias) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = reduce_lanes<kLanesOfRow>(d_bias[r], [](float a, float b) { return a + b; });
        const int column = own_line() + fragment_row(r);
        if (threadIdx.x % kLanesOfRow == 0 && column < p.shape.columns) p.d_column_bias[column] = sum;
      }
    }
    arch::fence_async_shared();
    arch::sync_threads(kOneConsumer + warpgroup, kWarpgroup);
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect()) {
      if constexpr (kTransposed) {
        arch::store(p.gradient, {own_line(), 0, job.staying_head, job.batch}, memory.staying[0] + own_slab);
      } else {
        for (int slab = 0; slab < kWidth / kSlab; ++slab) {
          const int offset = (slab * Tile::kStaying + warpgroup * kFragmentRows) * kLineBytes;
          arch::store(p.gradient, {slab * kSlab, own_line(), job.staying_head, job.batch},
                      memory.staying[0] + offset);
        }
      }
      arch::commit_stores();
      arch::wait_stores_read<0>();
    }
  }
};

template <class E, class Tile, PayloadMonoid M, class Scores>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fold_backward_pass_kernel(const __grid_constant__ PassArguments p, const __grid_constant__ M m,
                              const __grid_constant__ Scores scores) {
  extern __shared__ unsigned char shared_bytes[];
  using Consumer = PassConsumer<E, Tile, M, Scores>;
  auto& memory = *reinterpret_cast<typename Consumer::Memory*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) {
    memory.first_ring.init(Tile::kConsumers);
    memory.second_ring.init(Tile::kConsumers);
    memory.biases.init();
    arch::init(&memory.stayed, 1);
    arch::fence_init();
  }
  __syncthreads();

  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  const PassJob<Tile> job(p.shape, blockIdx.x);
  if (warpgroup == Tile::kConsumers) {
    arch::release_registers<24>();
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect()) produce<Consumer::kResiduals>(p, job, memory);
  } else {
    arch::take_registers<240>();
    Consumer consumer{m, scores, p, job, memory, warpgroup};
    consumer.run();
    consumer.finish();
  }
}

// Writes the gradient of Tile::kOf among those wanted (with the columns' goes a bias's of columns), of the element type.
// residuals and marks: as prepare_rows (row_residuals.cuh) left them.
template <class E, class Tile, PayloadMonoid M, class Scores>
void fold_backward_pass(const M& m, const Scores& scores, const FoldProblem& p, const FoldGradients& wanted,
                        const RowResiduals& residuals, const RowMarks& marks, const Launch& launch) {
  const std::int64_t group = p.heads() / p.column_heads(), lines = Tile::kOfRows ? p.rows() : p.columns();
  const std::int64_t heads = Tile::kOfRows ? p.heads() : p.column_heads();
  // Of what streams past the lines of a head; a group of heads shares it where the rows stay.
  const std::int64_t streamed_bytes = Tile::kOfRows ? p.columns() : p.rows() * group;
  const FoldShape shape(p, section_of(p, streamed_bytes * (p.width() + p.payload_width()) * sizeof(E),
                                      Tile::kOfRows ? group : 1));
  const auto payload = [](const TensorView& t, int lines_of_box) {
    return Tile::kTransposed ? tensor_map(transposed_rows(t), Tile::kWidth) : tensor_map(t, lines_of_box);
  };
  PassArguments arguments{.staying = {},
                          .streamed = {},
                          .gradient = {},
                          .d_column_bias = static_cast<float*>(wanted.d_bias.data),
                          .residuals = residuals,
                          .marks = marks,
                          .shape = shape,
                          .bias = bias_source<BiasElement<Scores>>(p.bias, kFragmentRows)};
  if constexpr (Tile::kOfRows) {
    arguments.staying[0] = tensor_map(p.a, Tile::kStaying);
    arguments.staying[1] = tensor_map(wanted.grad_out, Tile::kStaying);
    arguments.streamed[0] = tensor_map(p.b, Tile::kStreamed);
    arguments.streamed[1] = payload(p.payload, Tile::kStreamed);
    arguments.gradient = tensor_map(wanted.d_a, kFragmentRows);
  } else {
    arguments.staying[0] = tensor_map(p.b, Tile::kStaying);
    arguments.staying[1] = payload(p.payload, Tile::kStaying);
    arguments.streamed[0] = tensor_map(p.a, Tile::kStreamed);
    arguments.streamed[1] = tensor_map(wanted.grad_out, Tile::kStreamed);
    arguments.gradient =
        Tile::kOfPayload ? payload(wanted.d_payload, kFragmentRows) : tensor_map(wanted.d_b, kFragmentRows);
  }
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("fold_backward_pass_sm90", &fold_backward_pass_kernel<E, Tile, M, Scores>,
                blocks_for(p.batch() * heads * ((lines + Tile::kStaying - 1) / Tile::kStaying)),
                Tile::kThreads, sizeof(typename PassConsumer<E, Tile, M, Scores>::Memory) + kSharedAlignment,
                launch.stream, arguments, m, scores);
}

}  // namespace monoidreduce::sm90
