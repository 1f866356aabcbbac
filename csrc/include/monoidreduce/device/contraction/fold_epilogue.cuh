// The fold as an epilogue of the contraction (contraction_sm{80,90}.cuh). A cluster folds the tiles of its
// rows in registers and stores partial states of each row (for softmax, row max and sum of exponentials). A
// second kernel combines these in a fixed order: on one device the result has the same bits every time.
#pragma once

#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/contraction/row_order.cuh"
#include "monoidreduce/device/schedule/tile_schedule.cuh"
#include "monoidreduce/device/warp/lanes.cuh"

namespace monoidreduce {

// partial: [groups, clusters, shares, rows of a row block]. A cluster's index in a group is Group::start.
template <MonotoneMonoid M, FragmentScores<M> Scores, StateRows<M> Rows>
struct FoldEpilogue {
  struct Memory {};
  struct Work {
    typename M::State state[2];
    int label[2];
    typename M::Real factor[2];
  };
  M m;
  Scores scores;
  Rows rows;
  RowOrder order;
  int columns;
  typename M::State* partial;

  __device__ __forceinline__ Work begin(int row0) const {
    Work work;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int place = row0 + fragment_row(r);
      work.state[r] = m.identity();
      const bool exists = place < order.rows;
      work.label[r] = exists ? static_cast<int>(rows.label(order[place])) : -1;
      work.factor[r] = exists ? factor_of<typename M::Real>(rows, order[place]) : typename M::Real(1);
    }
    return work;
  }
  template <int kSize>
  __device__ __forceinline__ void tile(Work& work, float (&dots)[M::kScores][kSize], int row0, int column0,
                                       Memory&, int) const {
#pragma unroll
    for (int n = 0; n < M::kScores; ++n) scores.prepare(dots[n], row0, column0);
    accumulate_fragment(m, work.state, dots, scores, column0, columns, work.label, work.factor);
  }
  __device__ __forceinline__ void end(const Work& work, std::int64_t place) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto whole = reduce_lanes<kLanesOfRow>(
          work.state[r], [&](const auto& s, const auto& t) { return combine(m, s, t); });
      if (threadIdx.x % kLanesOfRow == 0) partial[place + fragment_row(r)] = whole;
    }
  }
  __device__ __forceinline__ void finish() const {}
};

// Combines the partial states of each row with kCombiningLanes threads, and calls rows.store(row, state), or
// rows.skip(row) if the row is not active. Tile is a template parameter so that each tier has its own kernel,
// compiled for its architecture.
template <class M, class Tile, class Rows>
__global__ void combine_partial(const __grid_constant__ M m, const __grid_constant__ TileSchedule of_all,
                                const __grid_constant__ RowOrder order, const typename M::State* partial,
                                const __grid_constant__ Rows rows) {
  static_assert((Monoid<M> || Combines<M>) && StateRows<Rows, M>);
  constexpr int kLanes = kCombiningLanes;
  const int lane = threadIdx.x % kLanes, counted = order.counted(),
            place = static_cast<int>(blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes);
  typename M::State state = m.identity();
  if (place < counted) {
    const TileSchedule schedule = of_all.with_row_blocks((counted + Tile::kRowBlock - 1) / Tile::kRowBlock);
    const auto group = schedule.group_of(place / Tile::kRowBlock);
    // Unrolled: with few rows a lane has several states, and would wait for each before it reads the next.
#pragma unroll 4
    for (int start = group.start + lane * group.count; start < schedule.clusters;
         start += kLanes * group.count) {
      for (int share = 0; share < Tile::kShares; ++share) {
        const std::int64_t slot =
            (std::int64_t{group.index} * schedule.clusters + start) * Tile::kShares + share;
        state = combine(m, state, partial[slot * Tile::kRowBlock + place % Tile::kRowBlock]);
      }
    }
  }
  state = reduce_lanes<kLanes>(state, [&](const auto& s, const auto& t) { return combine(m, s, t); });
  if (lane != 0 || place >= order.rows) return;
  if (place < counted)
    rows.store(order[place], state);
  else
    rows.skip(order[place]);
}

}  // namespace monoidreduce
