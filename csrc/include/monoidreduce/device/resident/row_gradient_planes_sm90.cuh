// The gradients of the rows of a user's program of one score on Hopper, for float32 operands of a width up to 128,
// with float32's accuracy: by fp16 planes (block/planes_sm90.cuh).
//
//   scores = rows . columns^T    program: scores become their gradients, in registers
//   sums  += gradients . columns
//
// A block owns 128 rows and walks one part of the columns, in tiles of 64. It also sums the gradients of the rows'
// data. No gradient of a score is stored. For gradients of columns the same kernel runs with rows and columns
// exchanged, as simt/program_narrow.cuh does for ordinary cores. Consumers take turns, as in
// fold_backward_planes_sm90.cuh.
#pragma once

#include "monoidreduce/device/block/planes_sm90.cuh"
#include "monoidreduce/device/block/ring.cuh"
#include "monoidreduce/device/contraction/planes.cuh"
#include "monoidreduce/device/contraction/program_epilogue.cuh"
#include "monoidreduce/device/resident/column_numbers.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"

namespace monoidreduce::sm90 {

// kWidth: of both operands, 64 or 128.
template <int kWidth_>
struct RowGradientTile {
  static constexpr int kWidth = kWidth_, kColumns = kPlaneLines, kStages = 4;
  static constexpr int kConsumers = 2, kRows = kConsumers * kFragmentRows;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
};

// Parts of the columns have sums of their own.
struct RowGradientArguments {
  PlaneMaps rows, columns;
  int row_blocks, parts;
  float* gradient;  // [parts, rows, width]
  int width;        // of the gradient, a multiple of 8
  float* sums;      // [parts, P::kSums, rows]
};

template <class Tile>
struct RowGradientMemory {
  using Operand = PlaneTile<Tile::kWidth>;
  Operand rows[Tile::kConsumers], columns[Tile::kStages];
  Ring<Tile::kStages, ReadBy::kThreads> ring;
  arch::Mbarrier rows_arrived;
};

// What a block computes: rows from row0 on, of the tiles [first_tile, end_tile) of columns.
template <class Tile>
struct RowGradientJob {
  int row0, part, first_tile, end_tile;

  __device__ __forceinline__ RowGradientJob(const RowGradientArguments& p, std::int64_t columns)
      : row0(blockIdx.x % p.row_blocks * Tile::kRows), part(blockIdx.x / p.row_blocks) {
    const std::int64_t tiles = (columns + Tile::kColumns - 1) / Tile::kColumns;
    first_tile = static_cast<int>(part * tiles / p.parts);
    end_tile = static_cast<int>((part + 1) * tiles / p.parts);
  }
};

// The producer: loads the rows, then the tiles of columns. Called by one thread.
template <class Tile>
__device__ __forceinline__ void produce_planes(const RowGradientArguments& p, const RowGradientJob<Tile>& job,
                                               RowGradientMemory<Tile>& memory) {
  constexpr int kBytes = RowGradientMemory<Tile>::Operand::kBytes;
  arch::arrive_expect(&memory.rows_arrived, Tile::kConsumers * kBytes);
  for (int w = 0; w < Tile::kConsumers; ++w)
    memory.rows[w].load(p.rows, {0, job.row0 + w * kFragmentRows, 0, 0}, &memory.rows_arrived);
  RingPosition<Tile::kStages> at;
#pragma unroll 1
  for (int tile = job.first_tile; tile < job.end_tile; ++tile, at.advance()) {
    arch::Mbarrier* const arrived = memory.ring.acquire(at, kBytes);
    memory.columns[at.stage].load(p.columns, {0, tile * Tile::kColumns, 0, 0}, arrived);
  }
}

// A consumer warpgroup, with 64 of the block's rows.
template <class P, class Tile>
struct RowGradientConsumer {
  static_assert(P::kScores == 1);
  using R = typename P::Real;
  using Columns = ColumnNumbers<P, Tile::kColumns>;
  static constexpr int kSize = Tile::kColumns / 2, kWidth = Tile::kWidth;
  // Named barriers: kTurns + w lets consumer w issue its products, kOneConsumer + w is consumer w's own.
  static constexpr int kTurns = 1, kOneConsumer = kTurns + Tile::kConsumers;

  const RowGradientArguments& p;
  const ProgramData& data;
  const RowGradientJob<Tile>& job;
  RowGradientMemory<Tile>& memory;
  Columns (&numbers)[2];
  const int warpgroup;
  RingPosition<Tile::kStages> at{};

  float scores[kSize];  // which become their gradients
  float sums[kWidth / 2];
  float row_scale[2];
  Numbers<float, P::kSums> of_data[2];
  ProgramRow<P> rows[2];

  __device__ __forceinline__ int row0() const { return job.row0 + warpgroup * kFragmentRows; }
  __device__ __forceinline__ void wait_for_turn() const {
    arch::sync_threads(kTurns + warpgroup, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void end_turn() const {
    arch::arrive_threads(kTurns + (warpgroup + 1) % Tile::kConsumers, 2 * kWarpgroup);
  }

  // scores = rows . columns^T. While products run, the numbers of the tile's columns are loaded.
  __device__ __forceinline__ void multiply_scores(int tile) {
    PlaneDots<kWidth> dots;
    memory.ring.wait(at);
    wait_for_turn();
    dots.multiply(memory.rows[warpgroup], memory.columns[at.stage]);
    end_turn();
    if constexpr (P::kColumnData + P::kColumnIndices > 0) {
      numbers[tile % 2].load(data, tile * Tile::kColumns);
      arch::sync_threads(kOneConsumer + warpgroup, kWarpgroup);
    }
    arch::wait_wgmma<0>();
    dots.scaled(scores, row_scale, memory.columns[at.stage].scales);
  }

  // Replaces scores by their gradients, and adds to the gradients of the rows' data. A tile's are summed by themselves, so that
  // no sum is long and sequential. kAll: all of the tile's columns exist.
  template <bool kAll>
  __device__ __forceinline__ void pull(const Columns& of_tile, int column0) {
    Numbers<float, P::kSums> staged[2] = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int r = row_of_element(i), column = fragment_column(i);
      // The score of the forward pass (PlanePair::scale), rounded by itself, as in fragment_element.
      const R score(fmaf(with_cut_off(scores[i]), static_cast<float>(data.scale), -0.f));
      ElementGradients<P> pulled =
          P::pulled(of_tile.element(score, score, rows[r], column, column0, data.tables));
      if (!kAll && column0 + column >= data.columns) pulled = {};
      scores[i] = scalar(pulled.score);
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) staged[r][k] += scalar(pulled.sums[k]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) of_data[r][k] += staged[r][k];
    }
  }

  // sums += gradients . columns
  __device__ __forceinline__ void add_product() {
    const auto& columns = memory.columns[at.stage];
    PlaneWeights weights;
    PlaneSums<kWidth> of_tile;
    weights.split(scores, columns.scales);
    wait_for_turn();
    of_tile.multiply(weights, columns);
    end_turn();
    arch::wait_wgmma<0>();
    of_tile.add_to(sums, weights);
  }

  __device__ __forceinline__ void run() {
    load_rows<P>(rows, data, row0());
#pragma unroll
    for (float& sum : sums) sum = 0.f;
#pragma unroll
    for (auto& sum : of_data) sum = {};
    arch::wait(&memory.rows_arrived, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_scale[r] = memory.rows[warpgroup].scales[fragment_row(r)].scale;
    if (warpgroup == Tile::kConsumers - 1) arch::arrive_threads(kTurns, 2 * kWarpgroup);
#pragma unroll 1
    for (int tile = job.first_tile; tile < job.end_tile; ++tile, at.advance()) {
      const int column0 = tile * Tile::kColumns;
      multiply_scores(tile);
      if (column0 + Tile::kColumns <= data.columns)
        pull<true>(numbers[tile % 2], column0);
      else
        pull<false>(numbers[tile % 2], column0);
      if constexpr (P::kOperands) add_product();
      memory.ring.release(at);
    }
  }

  __device__ __forceinline__ void store() const {
    const auto scale = static_cast<float>(data.scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto whole = reduce_lanes<kLanesOfRow>(of_data[r], [](Numbers<float, P::kSums> a, const auto& b) {
#pragma unroll
        for (int k = 0; k < P::kSums; ++k) a[k] += b[k];
        return a;
      });
      const int row = row0() + fragment_row(r);
      if (row >= data.rows) continue;
      if (threadIdx.x % kLanesOfRow == 0) {
#pragma unroll
        for (int k = 0; k < P::kSums; ++k)
          p.sums[(std::int64_t{job.part} * P::kSums + k) * data.rows + row] = whole[k];
      }
      if constexpr (P::kOperands) {
        float* const to = p.gradient + (job.part * data.rows + row) * p.width;
#pragma unroll
        for (int i = 2 * r; i < kWidth / 2; i += 4) {
          if (fragment_column(i) < p.width)
            *reinterpret_cast<float2*>(to + fragment_column(i)) = {sums[i] * scale, sums[i + 1] * scale};
        }
      }
    }
  }
};

template <class P, int kWidth>
__global__ void __launch_bounds__(RowGradientTile<kWidth>::kThreads, 1)
    row_gradient_planes_kernel(const __grid_constant__ RowGradientArguments p,
                               const __grid_constant__ ProgramData data) {
  using Tile = RowGradientTile<kWidth>;
  extern __shared__ unsigned char shared_bytes[];
  __shared__ ColumnNumbers<P, Tile::kColumns> numbers[Tile::kConsumers][2];
  auto& memory = *reinterpret_cast<RowGradientMemory<Tile>*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) {
    memory.ring.init(Tile::kConsumers);
    arch::init(&memory.rows_arrived, 1);
    arch::fence_init();
  }
  __syncthreads();

  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  const RowGradientJob<Tile> job(p, data.columns);
  if (warpgroup == Tile::kConsumers) {
    arch::setmaxnreg_dec<24>();
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect()) produce_planes(p, job, memory);
  } else {
    arch::setmaxnreg_inc<240>();
    RowGradientConsumer<P, Tile> consumer{p, data, job, memory, numbers[warpgroup], warpgroup};
    consumer.run();
    consumer.store();
  }
}

}  // namespace monoidreduce::sm90
