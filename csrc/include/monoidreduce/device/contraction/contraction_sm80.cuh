// The contraction on tensor cores from sm_80 on: a GEMM main loop, for widths that do not fit into shared
// memory. Tiles of rows and of columns both stream over the width (the GEMM's K). An epilogue takes each
// finished tile of dot products from registers, as in contraction_sm90.cuh.
//
// Eight warps compute a tile. Each has 16 rows of every 64, and half of the columns. With several fragments
// of 64 rows, a warp reuses each operand of columns for all of them. All warps load, one or more steps ahead,
// also across the end of a tile.
#pragma once

#include "monoidreduce/device/block/copy_tile.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/warp_operand.cuh"
#include "monoidreduce/device/contraction/quad_stores_sm80.cuh"
#include "monoidreduce/device/schedule/tile_schedule.cuh"
#include "monoidreduce/traits.h"

namespace monoidreduce::sm80 {

// A tile has kScores products. A thread holds them all in 128 registers together; or, with kParks, one at a
// time in 128 registers: the first one waits in global memory while the second is computed. kTransposed: the
// columns operand of the last product is [width, columns].
template <int kStages_, int kScores_ = 1, bool kTransposed_ = false, bool kParks_ = false>
struct ContractionTile {
  static constexpr bool kTransposed = kTransposed_, kParks = kParks_;
  static constexpr int kStages = kStages_, kScores = kScores_, kHeld = kParks ? 1 : kScores;
  static constexpr int kFragments = 4 / kHeld, kRows = kFragments * kFragmentRows, kColumns = 128;
  static constexpr int kBlocks = 1, kRowBlock = kRows, kPlanes = 1;
  static constexpr int kShares = 2, kShareColumns = kColumns / kShares;  // kShares: groups of four warps
  static constexpr int kThreads = 128 * kShares;
  static constexpr int kScratch = kParks ? kRows * kColumns : 0;  // floats of global memory for each block
  MR_HD static constexpr bool transposed(int score) { return kTransposed && score == kScores - 1; }
  template <int kOuts>
  using Stores = QuadStores<kOuts>;
};

template <class T>
concept ContractionTiling = requires {
  (T::kRows, T::kColumns, T::kScores, T::kHeld, T::kStages, T::kTransposed, T::kFragments, T::kShareColumns,
   T::kRowBlock, T::kThreads);
};

template <int kScores>
struct ContractionArguments {
  Lines rows[kScores], columns[kScores];
  int steps[kScores];  // steps of 64 elements along the width
  TileSchedule schedule;
  float4* parked;
};

template <class Tile>
struct ContractionMemory {
  unsigned char rows[Tile::kStages][SharedTile<Tile::kRows, kSlab>::kBytes];
  unsigned char columns[Tile::kStages][SharedTile<Tile::kColumns, kSlab>::kBytes];
};

// What the block loads: the steps of all its tiles, one after the other (the producer side of the pipeline).
template <class Tile>
struct ContractionFeed {
  const ContractionArguments<Tile::kScores>& p;
  ContractionMemory<Tile>& memory;
  TileSchedule::Group group = p.schedule.first(blockIdx.x);
  int tile = group.start, score = 0, step = 0;
  int row0 = 0, column0 = 0;        // of the tile being loaded
  int requested = 0, received = 0;  // the next stage to load, and the next to read

  __device__ __forceinline__ void place() {
    while (group.count > 0 && tile >= p.schedule.tiles(group)) {
      group = p.schedule.next(group);
      tile = group.start;
    }
    if (group.count == 0) return;
    row0 = group.row_block() * Tile::kRows;
    column0 = p.schedule.column_tile(group, tile) * Tile::kColumns;
  }
  template <int kScore>
  __device__ __forceinline__ void load() const {
    load_tile<Tile::kThreads, Tile::kRows, kSlab>(arch::shared_address(memory.rows[requested]),
                                                  p.rows[kScore], row0, step * kSlab);
    const arch::SharedAddress columns = arch::shared_address(memory.columns[requested]);
    if constexpr (Tile::transposed(kScore)) {
      load_tile<Tile::kThreads, kSlab, Tile::kColumns>(columns, p.columns[kScore], step * kSlab, column0);
    } else {
      load_tile<Tile::kThreads, Tile::kColumns, kSlab>(columns, p.columns[kScore], column0, step * kSlab);
    }
  }
  // Starts loading the next step, if there is one.
  __device__ __forceinline__ void request() {
    if (group.count > 0) {
      if (Tile::kScores == 1 || score == 0) {
        load<0>();
      } else {
        load<Tile::kScores - 1>();
      }
      if (++step == p.steps[score]) {
        step = 0;
        if (++score == Tile::kScores) {
          score = 0;
          tile += p.schedule.clusters;
          place();
        }
      }
    }
    arch::commit_copies();  // also if nothing was copied, so that groups can be counted
    if (++requested == Tile::kStages) requested = 0;
  }
  // Waits for the next step and returns its stage. Then starts loading into the stage of the step before.
  __device__ __forceinline__ int receive() {
    arch::wait_copies<Tile::kStages - 2>();
    __syncthreads();
    request();
    const int stage = received;
    if (++received == Tile::kStages) received = 0;
    return stage;
  }
};

// dots = rows . columns^T, for the warp's part of a tile.
template <class E, class Tile, int kScore>
__device__ __forceinline__ void multiply_tile(float (&dots)[Tile::kFragments][Tile::kShareColumns / 2],
                                              ContractionFeed<Tile>& feed, int steps) {
  constexpr bool kTransposed = Tile::transposed(kScore);
  using Columns = std::conditional_t<kTransposed, ColumnsOfElements<kSlab>, ColumnsOfLines<Tile::kColumns>>;
  const int warp_row = threadIdx.x / 32 % 4 * 16, share = threadIdx.x / 128;
  clear(dots);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = feed.receive();
    const RowsOfLines<Tile::kRows> rows(arch::shared_address(feed.memory.rows[stage]) +
                                        warp_row * kLineBytes);
    const Columns columns(arch::shared_address(feed.memory.columns[stage]) +
                          share * (kTransposed ? kSlab : Tile::kShareColumns) * kLineBytes);
    multiply<E, kSlab>(
        dots, [&](auto& words, int f, int k) { rows.load(words, f * kFragmentRows, k); },
        [&](auto& words, int k, int n) { columns.load(words, kTransposed ? k : n, kTransposed ? n : k); });
  }
}

// The calling thread's dot products of a tile, parked in global memory as float4.
template <class Tile>
struct ParkedDots {
  static constexpr int kSize = Tile::kShareColumns / 2;
  float4* const place;

  __device__ __forceinline__ explicit ParkedDots(float4* parked)
      : place(parked + blockIdx.x * (Tile::kScratch / 4) + threadIdx.x) {}
  __device__ __forceinline__ float4& at(int f, int i) const {
    return place[(f * kSize + i) / 4 * Tile::kThreads];
  }
  __device__ __forceinline__ void store(const float (&dots)[Tile::kFragments][kSize]) const {
#pragma unroll
    for (int f = 0; f < Tile::kFragments; ++f)
#pragma unroll
      for (int i = 0; i < kSize; i += 4)
        at(f, i) = {dots[f][i], dots[f][i + 1], dots[f][i + 2], dots[f][i + 3]};
  }
  __device__ __forceinline__ void load(float (&fragment)[kSize], int f) const {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const float4 four = at(f, i);
      fragment[i] = four.x, fragment[i + 1] = four.y, fragment[i + 2] = four.z, fragment[i + 3] = four.w;
    }
  }
};

// Whether the kernel calls an epilogue in a loop over fragments. Unrolled, a thread's code has the epilogue once for each of up to
// four fragments, which is too much for a program. In a loop Work is in local memory, as registers have no index.
template <class Epilogue>
inline constexpr bool kLooping = false;
template <class Epilogue>
  requires requires { Epilogue::kLoops; }
inline constexpr bool kLooping<Epilogue> = true;

// to = dots[f]. kLoops: f is not known to the compiler (arch/register.cuh).
template <bool kLoops, int kFragments, int kSize>
__device__ __forceinline__ void take_fragment(float (&to)[kSize], const float (&dots)[kFragments][kSize],
                                              int f) {
#pragma unroll
  for (int k = 0; k < kFragments; ++k) {
    if (k != f) continue;
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = kLoops ? arch::copied(dots[k][i]) : dots[k][i];
  }
}

// The contraction kernel. Where on sm_90 a warpgroup calls the epilogue, here half of the warps do, for one
// fragment after the other.
template <class E, class Tile, class Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    contraction_kernel(const __grid_constant__ ContractionArguments<Tile::kScores> p,
                       const __grid_constant__ Epilogue epilogue) {
  static_assert(ContractionTiling<Tile>);
  static_assert(ContractionEpilogue<Epilogue, Tile::kScores>);
  static_assert(std::is_empty_v<typename Epilogue::Memory>);
  constexpr int kSize = Tile::kShareColumns / 2, kUnrolled = kLooping<Epilogue> ? 1 : Tile::kFragments;
  extern __shared__ __align__(kLineBytes) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<ContractionMemory<Tile>*>(shared_bytes);
  typename Epilogue::Memory nothing;
  const ParkedDots<Tile> parked(p.parked);
  const int share = threadIdx.x / 128;

  ContractionFeed<Tile> feed{p, memory};
  feed.place();
#pragma unroll
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) feed.request();

#pragma unroll 1
  for (auto group = p.schedule.first(blockIdx.x); group.count > 0; group = p.schedule.next(group)) {
    const int row0 = group.row_block() * Tile::kRows;
    typename Epilogue::Work work[Tile::kFragments];
#pragma unroll(kUnrolled)
    for (int f = 0; f < Tile::kFragments; ++f) work[f] = epilogue.begin(row0 + f * kFragmentRows);
#pragma unroll 1
    for (int tile = group.start; tile < p.schedule.tiles(group); tile += p.schedule.clusters) {
      const int column0 = p.schedule.column_tile(group, tile) * Tile::kColumns + share * Tile::kShareColumns;
      float dots[Tile::kHeld][Tile::kFragments][kSize];
      multiply_tile<E, Tile, 0>(dots[0], feed, p.steps[0]);
      if constexpr (Tile::kParks) parked.store(dots[0]);
      if constexpr (Tile::kScores == 2) multiply_tile<E, Tile, 1>(dots[Tile::kHeld - 1], feed, p.steps[1]);
#pragma unroll(kUnrolled)
      for (int f = 0; f < Tile::kFragments; ++f) {
        float fragment[Tile::kScores][kSize];
        if constexpr (Tile::kParks) parked.load(fragment[0], f);
#pragma unroll
        for (int n = 0; n < Tile::kHeld; ++n)
          take_fragment<kLooping<Epilogue>>(fragment[Tile::kScores - Tile::kHeld + n], dots[n], f);
        epilogue.tile(work[f], fragment, row0 + f * kFragmentRows, column0, nothing, share);
      }
    }
    const std::int64_t slot =
        (std::int64_t{group.index} * p.schedule.clusters + group.start) * Tile::kShares + share;
#pragma unroll(kUnrolled)
    for (int f = 0; f < Tile::kFragments; ++f)
      epilogue.end(work[f], slot * Tile::kRowBlock + f * kFragmentRows);
  }
  epilogue.finish();
}

}  // namespace monoidreduce::sm80
