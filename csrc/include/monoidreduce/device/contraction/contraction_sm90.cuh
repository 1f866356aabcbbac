// The contraction on Hopper: a GEMM main loop, for widths that do not fit into shared memory. Tiles of rows
// and of columns both stream over the width (the GEMM's K). An epilogue takes each finished tile of dot
// products from registers.
//
// A 2-CTA cluster computes 2 x 128 rows by kColumns columns at a time. Each block loads half of the columns,
// by TMA multicast to both. For at most 128 rows a cluster is one block. A block is warp-specialized: one producer
// warpgroup, and two consumers of 64 rows each. The second consumer is a few steps behind the first, so that one
// multiplies while the other is in its epilogue.
#pragma once

#include "monoidreduce/device/arch/warpgroup.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/ring.cuh"
#include "monoidreduce/device/contraction/planes.cuh"
#include "monoidreduce/device/contraction/row_order.cuh"
#include "monoidreduce/device/contraction/slab_stores_sm90.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"
#include "monoidreduce/device/schedule/tile_schedule.cuh"
#include "monoidreduce/traits.h"

namespace monoidreduce::sm90 {

// A tile has kScores products, each in kColumns / 2 of a consumer thread's 240 registers. kRowsTransposed:
// the rows operand is [width, rows], and the row order (row_order.cuh) applies to the width. kPlanes: 2 if the
// operands are float32 numbers in two float16 planes (split_planes.cuh), otherwise 1. kBlocks: of a cluster.
template <int kColumns_, int kStages_, int kScores_ = 1, bool kRowsTransposed_ = false, int kPlanes_ = 1,
          int kBlocks_ = 2>
struct ContractionTile {
  static constexpr int kColumns = kColumns_, kStages = kStages_, kScores = kScores_, kPlanes = kPlanes_;
  static constexpr bool kRowsTransposed = kRowsTransposed_;
  static constexpr int kBlocks = kBlocks_, kConsumers = 2, kRows = kConsumers * kFragmentRows;
  static constexpr int kRowBlock = kBlocks * kRows;  // rows of a cluster
  static constexpr int kShares = 1;                  // consumers with the same rows
  static constexpr int kFragments = 1;               // fragments of rows of each thread
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kScratch = 0;
  // Steps by which the first consumer is ahead. A step of planes is three times as long, and stages are few: a stage is free
  // only when both have read it.
  static constexpr int kLead = kPlanes == 2 ? 0 : 2;
  template <int kOuts>
  using Stores = SlabStores<kOuts>;
  // Lines of a TMA box of columns: a block loads its share of a tile's lines ([width, columns]: of the
  // width).
  MR_HD static constexpr int column_lines(bool transposed) {
    return (transposed ? kSlab : kColumns) / kBlocks;
  }
};

// The tile of two planes. A stage has both planes of rows and columns, 64 KiB, and is multiplied three times. Wider tiles have no
// registers for the sums of Multiplier::add_products_of_planes.
template <int kScores = 1, bool kRowsTransposed = false>
using PlaneTile = ContractionTile<128, 3, kScores, kRowsTransposed, 2>;

template <class T>
concept ContractionTiling = requires {
  (T::kColumns, T::kScores, T::kStages, T::kPlanes, T::kRowsTransposed, T::kRowBlock, T::kBlocks,
   T::kConsumers, T::kThreads);
};

template <int kScores>
struct ContractionArguments {
  // Boxes of kRows (transposed: kSlab) and of column_lines lines.
  arch::TensorMap rows[kScores], columns[kScores];
  PlanePair planes[kScores];  // only read with two planes
  int steps[kScores];         // steps of 64 elements along the width
  bool transposed[kScores];   // the columns operand is [width, columns]
  TileSchedule schedule;      // for all rows, active or not
  RowOrder order;
};

template <ContractionTiling Tile, class EpilogueMemory>
struct alignas(kSharedAlignment) ContractionMemory {
  unsigned char rows[Tile::kStages][Tile::kPlanes][SharedTile<Tile::kRows, kSlab>::kBytes];
  unsigned char columns[Tile::kStages][Tile::kPlanes][SharedTile<Tile::kColumns, kSlab>::kBytes];
  EpilogueMemory epilogue;
  Ring<Tile::kStages, ReadBy::kProducts> ring;
};

// Steps along the width; with kRowsTransposed along its active part (`counted` elements), but at least one:
// the operands are then 0.
template <class Tile>
__device__ __forceinline__ int steps_of(const ContractionArguments<Tile::kScores>& p, int score,
                                        int counted) {
  return Tile::kRowsTransposed ? ::max((counted + kSlab - 1) / kSlab, 1) : p.steps[score];
}

// The producer: loads the stages of every tile of the cluster. Called by one thread per block.
template <class Tile, class Memory>
__device__ __forceinline__ void produce(const ContractionArguments<Tile::kScores>& p,
                                        const TileSchedule& schedule, int counted, Memory& memory,
                                        int cluster, int block) {
  using RowsTile = SharedTile<Tile::kRows, kSlab>;
  using ColumnsTile = SharedTile<Tile::kColumns, kSlab>;
  constexpr int kAll = (1 << Tile::kBlocks) - 1;
  RingPosition<Tile::kStages> at;
#pragma unroll 1
  for (auto group = schedule.first(cluster); group.count > 0; group = schedule.next(group)) {
    const int row0 = group.row_block() * Tile::kRowBlock + block * Tile::kRows;
#pragma unroll 1
    for (int tile = group.start; tile < p.schedule.tiles(group); tile += p.schedule.clusters) {
      const int column0 = p.schedule.column_tile(group, tile) * Tile::kColumns;
#pragma unroll
      for (int score = 0; score < Tile::kScores; ++score) {
        const arch::TensorMap &rows = p.rows[score], &columns = p.columns[score];
#pragma unroll 1
        for (int step = 0; step < steps_of<Tile>(p, score, counted); ++step) {
          arch::Mbarrier* const arrived =
              memory.ring.acquire(at, Tile::kPlanes * (RowsTile::kBytes + ColumnsTile::kBytes));
#pragma unroll
          for (int plane = 0; plane < Tile::kPlanes; ++plane) {
            const int row_offset = plane == 0 ? 0 : p.planes[score].low_rows,
                      column_offset = plane == 0 ? 0 : p.planes[score].low_columns;
            if constexpr (Tile::kRowsTransposed) {
              using Slabs = SharedTile<kSlab, Tile::kRows>;
              Slabs{memory.rows[at.stage][plane]}.load(rows, {row_offset + row0, step * kSlab, 0, 0},
                                                       arrived);
            } else {
              RowsTile{memory.rows[at.stage][plane]}.load(rows, {row_offset + step * kSlab, row0, 0, 0},
                                                          arrived);
            }
            // The block's share of the columns, multicast to all blocks.
            const int line = block * Tile::column_lines(p.transposed[score]);
            unsigned char* const to = memory.columns[at.stage][plane] + line * kLineBytes;
            if (p.transposed[score]) {
#pragma unroll
              for (int slab = 0; slab < Tile::kColumns / kSlab; ++slab)
                arch::load_to_blocks(to + slab * kSlab * kLineBytes, columns,
                                     {column_offset + column0 + slab * kSlab, step * kSlab + line, 0, 0},
                                     arrived, kAll);
            } else {
              arch::load_to_blocks(to, columns, {column_offset + step * kSlab, column0 + line, 0, 0}, arrived,
                                   kAll);
            }
          }
          at.advance();
        }
      }
    }
  }
}

// The consumer's side: a warpgroup that multiplies, and its position in the ring.
template <class E, class Tile, class Memory>
struct Multiplier {
  Memory& memory;
  const int warpgroup;
  RingPosition<Tile::kStages> at;
  static constexpr int kPingPong = 1;  // the named barrier at which the second consumer waits for the first

  // dots = rows . columns^T of a tile, 64 x kColumns.
  template <int kScore>
  __device__ __forceinline__ void run(float (&dots)[Tile::kColumns / 2],
                                      const ContractionArguments<Tile::kScores>& p, int counted) {
    const int steps = steps_of<Tile>(p, kScore, counted);
    // With fewer steps than stages, the first consumer could get more than a tile ahead.
    const bool staggered = kScore == 0 && steps >= Tile::kStages;
    if (staggered && warpgroup == 1) arch::sync_threads(kPingPong, 2 * kWarpgroup);
    RingPosition<Tile::kStages> before = at;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      memory.ring.wait(at);
      if (p.transposed[kScore]) {
        multiply<true>(dots, step == 0);
      } else {
        multiply<false>(dots, step == 0);
      }
      if constexpr (Tile::kPlanes == 1) {
        if (step > 0) {
          arch::wait_wgmma<1>();
          memory.ring.template release_to_cluster<Tile::kBlocks>(before);
        }
      }
      if (staggered && warpgroup == 0 && step == Tile::kLead) arch::arrive_threads(kPingPong, 2 * kWarpgroup);
      before = at;
      at.advance();
    }
    if constexpr (Tile::kPlanes == 1) {
      arch::wait_wgmma<0>();
      arch::pin(dots);
      memory.ring.template release_to_cluster<Tile::kBlocks>(before);
    }
  }

 private:
  using Dots = float[Tile::kColumns / 2];

  // Multiplies the stage that has arrived. first: the accumulators start from 0.
  template <bool kTransposed>
  __device__ __forceinline__ void multiply(Dots& dots, bool first) {
    if constexpr (Tile::kPlanes == 2) {
      add_products_of_planes<kTransposed>(dots, first);
    } else {
      arch::pin(dots);
      arch::fence_wgmma();
      multiply_planes<kTransposed>(dots, 0, 0, 0, kSteps, first);
      arch::commit_wgmma();
    }
  }

  // Multiplies the stage in two halves, adds the products to dots, and releases the stage.
  //
  // wgmma truncates its sums: each instruction makes them smaller by up to 2^-23, which shows after many. So the
  // products of a half are summed from 0, the small ones first, and then added to dots with rounding. The
  // product of both low planes is below the last bit of a float32 result.
  //
  // With one score, both halves are issued before the first is waited for. Two scores leave registers for the
  // sums of one half: the other consumer keeps the tensor cores busy while this one adds.
  template <bool kTransposed>
  __device__ __forceinline__ void add_products_of_planes(Dots& dots, bool first) {
    if constexpr (Tile::kScores == 1) {
      Dots sums[2];
      begin_half<kTransposed>(sums[0], 0);
      begin_half<kTransposed>(sums[1], 1);
      arch::wait_wgmma<1>();
      add_half(dots, sums[0], first);
      arch::wait_wgmma<0>();
      arch::pin(sums[1]);
      memory.ring.template release_to_cluster<Tile::kBlocks>(at);
      add_half(dots, sums[1], false);
    } else {
      Dots sums;
      begin_half<kTransposed>(sums, 0);
      arch::wait_wgmma<0>();
      add_half(dots, sums, first);
      begin_half<kTransposed>(sums, 1);
      arch::wait_wgmma<0>();
      arch::pin(sums);
      memory.ring.template release_to_cluster<Tile::kBlocks>(at);
      add_half(dots, sums, false);
    }
  }
  // Issues the products of half a stage.
  template <bool kTransposed>
  __device__ __forceinline__ void begin_half(Dots& sums, int half) const {
    constexpr int kHigh = 0, kLow = 1;
    const int begin = half * kSteps / 2, end = begin + kSteps / 2;
    arch::pin(sums);
    arch::fence_wgmma();
    multiply_planes<kTransposed>(sums, kHigh, kLow, begin, end, true);
    multiply_planes<kTransposed>(sums, kLow, kHigh, begin, end, false);
    multiply_planes<kTransposed>(sums, kHigh, kHigh, begin, end, false);
    arch::commit_wgmma();
  }
  // Adds the finished products of half a stage. first: dots has nothing yet.
  __device__ __forceinline__ void add_half(Dots& dots, Dots& sums, bool first) const {
    arch::pin(sums);
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) dots[i] = first ? sums[i] : dots[i] + sums[i];
  }

  static constexpr int kSteps = kSlab / kProductDepth;  // instructions for a stage and a pair of planes

  // Issues the instructions [begin, end) of the stage for a plane of each operand.
  template <bool kTransposed>
  __device__ __forceinline__ void multiply_planes(Dots& sums, int rows_plane, int columns_plane, int begin,
                                                  int end, bool first) const {
    using Rows = std::conditional_t<Tile::kRowsTransposed, AlongRows<kSlab>, AlongWidth<Tile::kRows>>;
    using Columns = std::conditional_t<kTransposed, AlongRows<kSlab>, AlongWidth<Tile::kColumns>>;
    static_assert(kFragmentRows == kSlab);  // the rows of a warpgroup are 64 lines, or one slab
    const Rows rows(arch::shared_address(memory.rows[at.stage][rows_plane]) +
                    warpgroup * kFragmentRows * kLineBytes);
    const Columns columns(arch::shared_address(memory.columns[at.stage][columns_plane]));
#pragma unroll
    for (int k = begin; k < end; ++k)
      arch::Wgmma<E, Tile::kColumns>::template shared<Tile::kRowsTransposed, kTransposed>(
          sums, rows[k], columns[k], !first || k != begin);
  }
};

template <class E, class Tile, class Epilogue>
__global__ void __cluster_dims__(Tile::kBlocks) __launch_bounds__(Tile::kThreads, 1)
    contraction_kernel(const __grid_constant__ ContractionArguments<Tile::kScores> p,
                       const __grid_constant__ Epilogue epilogue) {
  static_assert(ContractionEpilogue<Epilogue, Tile::kScores>);
  extern __shared__ unsigned char shared_bytes[];
  using Memory = ContractionMemory<Tile, typename Epilogue::Memory>;
  auto& memory = *reinterpret_cast<Memory*>(shared_bytes +
                                            (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  const int counted = p.order.counted();
  // Producer and consumers each compute this for themselves: a value shared by both would be spilled in both.
  const auto find_schedule = [&] {
    return Tile::kRowsTransposed
               ? p.schedule
               : p.schedule.with_row_blocks((counted + Tile::kRowBlock - 1) / Tile::kRowBlock);
  };
  if (threadIdx.x == 0) {
    memory.ring.init(Tile::kBlocks * Tile::kConsumers);
    arch::fence_init();
  }
  arch::arrive_cluster();
  arch::wait_cluster();

  const int cluster = blockIdx.x / Tile::kBlocks, block = arch::cluster_rank();
  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == Tile::kConsumers) {
    arch::setmaxnreg_dec<24>();
    if (threadIdx.x % kWarpgroup < 32 && arch::elect())
      produce<Tile>(p, find_schedule(), counted, memory, cluster, block);
    __syncwarp();
  } else {
    arch::setmaxnreg_inc<240>();
    const TileSchedule schedule = find_schedule();
    Multiplier<E, Tile, Memory> multiplier{memory, warpgroup, {}};
#pragma unroll 1
    for (auto group = schedule.first(cluster); group.count > 0; group = schedule.next(group)) {
      const int row0_of_block = block * Tile::kRows + warpgroup * kFragmentRows;
      const int row0 = group.row_block() * Tile::kRowBlock + row0_of_block;
      auto work = epilogue.begin(row0);
#pragma unroll 1
      for (int tile = group.start; tile < p.schedule.tiles(group); tile += p.schedule.clusters) {
        float dots[Tile::kScores][Tile::kColumns / 2];
        multiplier.template run<0>(dots[0], p, counted);
        if constexpr (Tile::kScores == 2) multiplier.template run<1>(dots[1], p, counted);
        const int column0 = p.schedule.column_tile(group, tile) * Tile::kColumns;
        if constexpr (Tile::kPlanes == 2) {
#pragma unroll
          for (int score = 0; score < Tile::kScores; ++score)
            p.planes[score].scale(dots[score], row0, column0);
        }
        epilogue.tile(work, dots, row0, column0, memory.epilogue, warpgroup);
      }
      const std::int64_t slot = std::int64_t{group.index} * p.schedule.clusters + group.start;
      epilogue.end(work, slot * Tile::kRowBlock + row0_of_block);
    }
    epilogue.finish();
  }
  // A block must not exit while other blocks of the cluster still signal its barriers.
  arch::arrive_cluster();
  arch::wait_cluster();
}

}  // namespace monoidreduce::sm90
