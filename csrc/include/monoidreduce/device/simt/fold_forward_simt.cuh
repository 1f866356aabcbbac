// The forward fold on any GPU: any monoid, any scores (elements.cuh), any element type, width and strides.
//
// A block owns 64 rows of one batch and head and walks the columns that its rows keep, 64 at a time. It
// computes scores by a product and then folds them, four lanes to a row. The lanes combine their states at
// the end. With a payload, the lanes of a row agree on a frame (row max) at every tile, because they all
// weigh into the same payload sums. These are the product of the tile of weights and the payload. A payload
// wider than 128 is cut into slices for different blocks, and each block recomputes the scores.
//
// Without a payload, the columns of a tile of rows may be split between blocks (splits.cuh).
#pragma once

#include "monoidreduce/device/block/elements.cuh"
#include "monoidreduce/device/simt/splits.cuh"
#include "monoidreduce/traits.h"

namespace monoidreduce {

namespace simt {

// Shapes as in FoldProblem and FoldOutput (fold.h). splits: only one with a payload.
struct ForwardArguments {
  Tensor rows[2], columns[2];  // for each score
  Tensor payload, bias;
  Tensor out, out_low, out_bias;
  ColumnRange range;
  Splits splits;
};

// Tiles that a block sums: 32 registers a thread (float), 64 (double).
inline constexpr int kPayloadTiles = 2;
inline constexpr int kSlice = kPayloadTiles * kTile;

// Replaces dot products by scores: in tile and, for a monoid of two scores, in other_tile.
template <Monoid M, class Scores, class T>
__device__ __forceinline__ void score_elements(const Scores& scores, Validity valid, std::int64_t row0,
                                               std::int64_t column0, T* tile, T* other_tile) {
#pragma unroll 4
  for (int n = 0; n < kLaneElements; ++n) {
    if (!valid[n]) continue;
    const int at = element_column(n) * kPitch + element_row();
    const T dot = tile[at];
    tile[at] = scores.at(row0 + element_row(), column0 + element_column(n)).value(dot);
    if constexpr (M::kScores == 2) other_tile[at] = scores.score.value(other_tile[at], T(0));
  }
}

// Folds the valid elements of the calling thread into its state, like fold_tile of monoid.h. With a payload
// the lanes of the row first join their frames. weigh(n, weight) receives the weight of element n in the new
// frame, 0 if it is not valid. Returns the factor by which earlier payload sums must be multiplied.
template <bool kPayload, Monoid M, class ElementAt, class Weigh>
__device__ __forceinline__ typename M::Real fold_elements(const M& m, typename M::State& state,
                                                          Validity valid, const ElementAt& element,
                                                          const Weigh& weigh) {
  using T = typename M::Real;
  if constexpr (!FramedMonoid<M>) {
#pragma unroll 4
    for (int n = 0; n < kLaneElements; ++n) {
      if (valid[n]) state = combine(m, state, m.lift(element(n)));
    }
    return T(1);
  } else {
    const auto before = m.frame_of(state);
    auto frame = before;
#pragma unroll 4
    for (int n = 0; n < kLaneElements; ++n) {
      if (valid[n]) frame = m.join(frame, m.frame(element(n)));
    }
    if constexpr (kPayload)
      frame = reduce_lanes<kRowLanes>(frame, [&](const auto& f, const auto& g) { return m.join(f, g); });
    state = m.reframe(state, frame);
    with_named(m, [&](const auto& m) {
#pragma unroll 4
      for (int n = 0; n < kLaneElements; ++n) {
        T weight = T(0);
        if (valid[n]) {
          state = m.accumulate(state, element(n));
          if constexpr (kPayload) weight = m.weight(element(n), frame);
        }
        if constexpr (kPayload) weigh(n, weight);
      }
    });
    if constexpr (kPayload) {
      return m.rescale(before, frame);
    } else {
      return T(1);
    }
  }
}

template <bool kPayload, class M, class Rows, class Policy = Score<typename M::Real>>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<typename M::Real>)
    fold_forward(const __grid_constant__ M m, const __grid_constant__ ForwardArguments p,
                 const __grid_constant__ Policy score, const __grid_constant__ Rows rows) {
  static_assert(Monoid<M> && RowPolicy<Rows, M>);
  using T = typename M::Real;
  extern __shared__ __align__(32) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<TileMemory<T>*>(shared_bytes);
  const std::int64_t heads = p.rows[0].size[1], row_count = p.rows[0].size[2], columns = p.columns[0].size[2];
  const std::int64_t group = heads / p.columns[0].size[1];
  const std::int64_t payload_width = kPayload ? p.payload.size[3] : 0;
  const std::int64_t row_tiles = divide_up(row_count, kTile);
  const std::int64_t slices = payload_width > 0 ? divide_up(payload_width, kSlice) : 1;
  const std::int64_t tiles = p.rows[0].size[0] * heads * row_tiles * slices;

#pragma unroll 1
  for (std::int64_t job = blockIdx.x; job < tiles * p.splits.count; job += gridDim.x) {
    // Blocks that run at the same time have the same split: they read the same columns.
    const std::int64_t tile = job % tiles, split = job / tiles;
    const std::int64_t slice = tile % slices, row_tile = tile / slices % row_tiles,
                       head_of_batch = tile / slices / row_tiles;
    const std::int64_t batch = head_of_batch / heads, head = head_of_batch % heads,
                       column_head = head / group;
    const std::int64_t row0 = row_tile * kTile, slice0 = slice * kSlice;
    const auto scores = scores_of_head(score, p.bias, batch, head);
    static_assert(ElementScores<decltype(scores), T>);

    // The calling thread's row (element view).
    const std::int64_t row = row0 + element_row(), flat_row = head_of_batch * row_count + row;
    const bool row_exists = row < row_count, first_lane = threadIdx.x % kRowLanes == 0;
    const Index<T> label = row_exists ? static_cast<Index<T>>(rows.label(flat_row)) : Index<T>(-1);
    const T factor = row_exists ? factor_of<T>(rows, flat_row) : T(1);
    typename M::State state = m.identity();
    ThreadTile<T> sum[kPayloadTiles];
#pragma unroll
    for (int g = 0; g < kPayloadTiles; ++g) clear<T>(sum[g]);

    const std::int64_t last_row = min(row0 + kTile, row_count) - 1;
    std::int64_t first_column = p.range.begin(row0) / kTile * kTile,
                 end_column = p.range.end(last_row, columns);
    if constexpr (!kPayload) p.splits.take(first_column, end_column, split);
#pragma unroll 1
    for (std::int64_t column0 = first_column; column0 < end_column; column0 += kTile) {
      if (!scores.touches(row0, column0)) continue;
      const Validity valid = find_valid(memory, p.range, scores, row_exists, columns, row0, column0);
      if (!valid.any) continue;

#pragma unroll 1
      for (int n = 0; n < M::kScores; ++n) {
        multiply_rows<!kPayload>(n == 0 ? memory.first : memory.second, memory,
                                 Matrix<T>(p.rows[n], batch, head), row0,
                                 Matrix<T>(p.columns[n], batch, column_head), column0);
      }
      __syncthreads();

      score_elements<M>(scores, valid, row0, column0, memory.first, memory.second);
      const auto element = [&](int n) {
        const int at = element_column(n) * kPitch + element_row();
        return Element<T>{memory.first[at], M::kScores == 2 ? memory.second[at] : T(0),
                          static_cast<Index<T>>(column0 + element_column(n)), label, factor};
      };
      const auto weigh = [&](int n, T weight) {
        if constexpr (DropsWeights<std::remove_cvref_t<decltype(scores)>>)
          weight = valid[n] ? weight * scores.at(row, column0 + element_column(n)).factor() : weight;
        memory.first[element_column(n) * kPitch + element_row()] = weight;
      };
      const T scale = fold_elements<kPayload>(m, state, valid, element, weigh);

      if constexpr (kPayload) {
        if (first_lane) memory.row_value[element_row()] = scale;
        __syncthreads();
#pragma unroll
        for (int g = 0; g < kPayloadTiles; ++g) {
          const std::int64_t k = slice0 + g * kTile;
          if (k >= payload_width) continue;
          // The tile's own sums are added once: that loses fewer digits than one long sum.
          ThreadTile<T> product;
          clear<T>(product);
          multiply_tile(product, memory, false, valid.full, Matrix<T, true>(p.payload, batch, column_head),
                        column0, k);
#pragma unroll
          for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
            for (int j = 0; j < kThreadColumns; ++j)
              sum[g][i][j] = sum[g][i][j] * memory.row_value[product_row(i)] + product[i][j];
        }
      }
    }

    state = reduce_lanes<kRowLanes>(state, [&](const auto& s, const auto& t) { return combine(m, s, t); });
    if constexpr (!kPayload) {
      if (p.splits.count > 1) {
        const std::int64_t first = split * p.rows[0].size[0] * heads * row_count;
        if (row_exists && first_lane)
          static_cast<typename M::State*>(p.splits.partial)[first + flat_row] = state;
        continue;
      }
    }
    T divisor(1);  // what the payload's sums are divided by
    if constexpr (kPayload) divisor = m.mass(state);
    if constexpr (kPayload && RowsWithSinks<Rows, M>) {
      if (rows.has_sinks()) {
        const T scale = join_sink(m, state, rows.sink(head)), mass = m.mass(state);
        divisor = mass == T(0) ? mass : mass / scale;
      }
    }
    if (slice == 0 && row_exists && first_lane) rows.store(flat_row, m.project(state));
    if constexpr (kPayload) {
      __syncthreads();
      if (first_lane) memory.row_value[element_row()] = divisor;
      const Matrix<T> out(p.out, batch, head);
#pragma unroll
      for (int g = 0; g < kPayloadTiles; ++g) {
        put_tile(memory.first, sum[g]);
        __syncthreads();
#pragma unroll 1
        for (int at = threadIdx.x; at < kTile * kTile; at += kThreads) {
          const int r = at / kTile, c = at % kTile;
          const std::int64_t k = slice0 + g * kTile + c;
          if (row0 + r >= row_count || k >= payload_width) continue;
          T value = memory.first[c * kPitch + r];
          if constexpr (M::kNormalized)
            value = memory.row_value[r] == T(0) ? T(0) : value / memory.row_value[r];
          if (p.out_bias.data) value += Matrix<T>(p.out_bias, 0, 0).read(0, k);
          out.write(row0 + r, k, value);
          if (p.out_low.data)
            Matrix<T>(p.out_low, batch, head).write(row0 + r, k, low_word(value, out.read(row0 + r, k)));
        }
        __syncthreads();
      }
    }
  }
}

inline constexpr int kCombiningLanes = 32;

// The second kernel, if columns are split: each warp combines the states that the splits stored for one row.
// row_count: the number of rows of all batches and heads.
template <class M, class Rows>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<typename M::Real>)
    combine_splits(const __grid_constant__ M m, const __grid_constant__ Rows rows,
                   const __grid_constant__ Splits splits, std::int64_t row_count) {
  const auto* const partial = static_cast<const typename M::State*>(splits.partial);
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kCombiningLanes,
                     step = std::int64_t{gridDim.x} * kThreads / kCombiningLanes;
  const int lane = threadIdx.x % kCombiningLanes;
#pragma unroll 1
  for (std::int64_t row = first; row < row_count; row += step) {
    typename M::State state = m.identity();
    with_named(m, [&](const auto& m) {
#pragma unroll 1
      for (std::int64_t split = lane; split < splits.count; split += kCombiningLanes)
        state = combine(m, state, partial[split * row_count + row]);
      state = reduce_lanes<kCombiningLanes>(state,
                                            [&](const auto& s, const auto& t) { return combine(m, s, t); });
      if (lane == 0) rows.store(row, m.project(state));
    });
  }
}

}  // namespace simt

}  // namespace monoidreduce
