// A user's program on Hopper: all scores, statistics and sums of vectors in one pass over the columns, for several
// batches at once. For operands whose rows fit into shared memory.
//
//   scores[n] = rows[n] . columns[n]^T     from shared memory      program: scores become weights, in registers
//   sums[k]  += weights[g] . payload[k]   weights from registers; perhaps for several weights g and vectors of a sum
//
// Operands are streamed in slabs: 64 lines of 64 elements of the width. A block has 128 rows of one batch, and adds
// up some slabs of the payload; for a wider payload there are several kernels. Two consumer warpgroups own 64 rows
// each; a producer loads by TMA. A consumer multiplies the scores of the next tile together with the payload of this
// one. Consumers issue products in turn, so that one consumer's program hides behind the other's products.
#pragma once

#include "monoidreduce/device/arch/warpgroup.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/ring.cuh"
#include "monoidreduce/device/contraction/program_epilogue.cuh"
#include "monoidreduce/device/resident/column_numbers.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"

namespace monoidreduce::sm90 {

// A block's slabs of the payload sums, perhaps none. kSum[k]: which of the program's payload sums slab k belongs to.
template <int... kSums>
struct PayloadSlabs {
  static constexpr int kCount = sizeof...(kSums), kSum[] = {kSums..., -1};
};

struct PayloadFold {
  static constexpr int kColumns = 64, kConsumers = 2, kRows = kConsumers * kFragmentRows;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kSlabBytes = SharedTile<kSlab, kSlab>::kBytes;
  // The most slabs of the rows of both scores, of a block's payload sums, and how many are in flight. A consumer holds
  // the slabs of a tile's scores and of a tile of payload at the same time.
  static constexpr int kRowSlabs = 6, kPayloadSlabs = 3, kStages = 12;
};

struct PayloadFoldArguments {
  arch::TensorMap rows[2], columns[2], payload;  // [batches, 1, lines, width], in slabs
  int steps[2];                                  // slabs of the width of each score
  int first_slab;                                // of the payload; the kernel of slab 0 writes the statistics
  int row_blocks;                                // of a batch
  const std::int64_t* wanted;  // the kernel does nothing if this is 0; null: there is no such number
  float* sums;                 // [batches * rows, pitch]
  std::int64_t pitch;  // all payload sums side by side; the payload has as much for each of a sum's vectors
};

struct alignas(kSharedAlignment) PayloadFoldMemory {
  unsigned char rows[PayloadFold::kRowSlabs][PayloadFold::kConsumers][PayloadFold::kSlabBytes];
  unsigned char slabs[PayloadFold::kStages][PayloadFold::kSlabBytes];
  Ring<PayloadFold::kStages, ReadBy::kProducts> ring;
  arch::Mbarrier rows_arrived;
  int first_column, end_column;  // the columns that some row of the block needs
};

struct TileSpan {
  int first, end;
};

template <int kScores>
__device__ __forceinline__ int row_slabs(const PayloadFoldArguments& p) {
  return kScores == 1 ? p.steps[0] : p.steps[0] + p.steps[1];
}

// The producer: loads the block's rows, then the slabs of all tiles in the order in which consumers multiply them.
// Called by one thread.
template <class P, class Slabs>
__device__ __forceinline__ void produce(const PayloadFoldArguments& p, PayloadFoldMemory& memory, int batch,
                                        int row0, TileSpan tiles) {
  constexpr int kBytes = PayloadFold::kSlabBytes;
  RingPosition<PayloadFold::kStages> at;
  const auto load = [&](const arch::TensorMap& map, int slab, int tile) {
    arch::Mbarrier* const arrived = memory.ring.acquire(at, kBytes);
    arch::load(memory.slabs[at.stage], map, {slab * kSlab, tile * PayloadFold::kColumns, 0, batch}, arrived);
    at.advance();
  };
  const auto load_payload = [&](int tile) {
#pragma unroll 1
    for (int slab = 0; slab < Slabs::kCount; ++slab) {
#pragma unroll
      for (int v = 0; v < P::kVectors; ++v)
        load(p.payload, v * static_cast<int>(p.pitch / kSlab) + p.first_slab + slab, tile);
    }
  };
  constexpr int kScores = P::kScores;
  arch::arrive_expect(&memory.rows_arrived, row_slabs<kScores>(p) * PayloadFold::kConsumers * kBytes);
  int place = 0;
#pragma unroll
  for (int n = 0; n < kScores; ++n) {
#pragma unroll 1
    for (int step = 0; step < p.steps[n]; ++step, ++place) {
#pragma unroll
      for (int w = 0; w < PayloadFold::kConsumers; ++w)
        arch::load(memory.rows[place][w], p.rows[n], {step * kSlab, row0 + w * kFragmentRows, 0, batch},
                   &memory.rows_arrived);
    }
  }
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.end; ++tile) {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll 1
      for (int step = 0; step < p.steps[n]; ++step) load(p.columns[n], step, tile);
    }
    if (tile > tiles.first) load_payload(tile - 1);
  }
  load_payload(tiles.end - 1);
}

// The tiles of columns that the rows of a block need; at least one. Called by all threads of the block.
template <class P>
__device__ __forceinline__ TileSpan find_tiles(PayloadFoldMemory& memory, const ProgramData& data, int row0) {
  const int columns = static_cast<int>(data.columns);
  if constexpr (P::kBounded) {
    const int row = row0 + threadIdx.x;
    if (threadIdx.x < PayloadFold::kRows && row < data.rows) {
      const ProgramElement<P> element{{}, {}, {}, data.of_row<P>(row), {}, {}, data.tables};
      std::int64_t first = 0, end = columns;
      P::bound(element, first, end);
      if (first < end) {
        atomicMin(&memory.first_column, static_cast<int>(first));
        atomicMax(&memory.end_column, static_cast<int>(end));
      }
    }
    __syncthreads();
  }
  const int first = P::kBounded ? ::min(memory.first_column, columns - 1) / PayloadFold::kColumns : 0,
            end = P::kBounded ? memory.end_column : columns;
  return {first, ::max((end + PayloadFold::kColumns - 1) / PayloadFold::kColumns, first + 1)};
}

// A consumer warpgroup, with 64 rows of the block.
template <class E, class P, class Slabs>
struct PayloadConsumer {
  using R = typename P::Real;
  static constexpr int kScores = P::kScores, kVectors = P::kVectors, kSize = PayloadFold::kColumns / 2;
  static_assert(PayloadFold::kStages > PayloadFold::kRowSlabs + Slabs::kCount * kVectors);
  using Frames = Numbers<R, P::kSoftmaxes>;
  using Columns = ColumnNumbers<P, PayloadFold::kColumns>;
  static constexpr int kOneConsumer = 1,
                       kTurns = 3;  // named barriers; kTurns + w lets consumer w issue its products

  const PayloadFoldArguments& p;
  PayloadFoldMemory& memory;
  Columns (&numbers)[2];
  const ProgramData& data;  // of the batch
  const int warpgroup;
  RingPosition<PayloadFold::kStages> at{}, released{};

  // The scores of a tile, which become the weights of the payload sums.
  float tile[kScores < P::kWeights ? P::kWeights : kScores][kSize];
  std::uint32_t operands[P::kWeights > 0 ? P::kWeights : 1][kSize / 2];
  float sums[Slabs::kCount > 0 ? Slabs::kCount : 1][kSize];
  StatisticsState<P> state[2];
  Frames scale[2];  // what the sums must be multiplied with, since frames have moved
  ProgramRow<P> rows[2];

  // tile = rows . columns^T; asynchronous.
  __device__ __forceinline__ void multiply_scores() {
    int place = 0;
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      // Not `for`: if there might be no step, accumulators would be copied while products are in flight.
      int step = 0;
#pragma unroll 1
      do {
        const AlongWidth<kFragmentRows> rows(arch::shared_address(memory.rows[place][warpgroup]));
        const AlongWidth<kSlab> columns(arch::shared_address(memory.slabs[at.stage]));
        memory.ring.wait(at);
        arch::pin(tile[n]);
        arch::fence_wgmma();
#pragma unroll
        for (int k = 0; k < kSlab / kProductDepth; ++k)
          arch::Wgmma<E, PayloadFold::kColumns>::template shared<false, false>(tile[n], rows[k], columns[k],
                                                                               step != 0 || k != 0);
        arch::commit_wgmma();
        at.advance(), ++place;
      } while (++step < p.steps[n]);
    }
  }
  // sums += weights . payload of a tile; asynchronous.
  __device__ __forceinline__ void multiply_payload() {
#pragma unroll
    for (int slab = 0; slab < Slabs::kCount; ++slab) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const AlongRows<kSlab> payload(arch::shared_address(memory.slabs[at.stage]));
        memory.ring.wait(at);
        arch::pin(sums[slab]);
        arch::fence_wgmma();
#pragma unroll
        for (int k = 0; k < PayloadFold::kColumns / kProductDepth; ++k)
          arch::Wgmma<E, kSlab>::template registers<true>(
              sums[slab], &operands[Slabs::kSum[slab] * kVectors + v][4 * k], payload[k], true);
        at.advance();
      }
    }
    arch::commit_wgmma();
  }
  // Frees so many slabs, which finished products have read.
  __device__ __forceinline__ void release(int slabs) {
#pragma unroll 1
    for (int slab = 0; slab < slabs; ++slab, released.advance()) memory.ring.release(released);
  }

  // Element i of a tile. Scores are rounded by themselves, as in fragment_element.
  __device__ __forceinline__ ProgramElement<P> element_of(const Columns& numbers, int column0, int i) const {
    const auto score = [&](int n) { return R(fmaf(tile[n][i], static_cast<float>(data.scale), -0.f)); };
    return numbers.element(score(0), score(kScores - 1), rows[row_of_element(i)], fragment_column(i), column0,
                           data.tables);
  }
  // The program's elements of a tile: moves frames, adds to the statistics, and makes weights of scores.
  template <bool kAll>
  __device__ __forceinline__ void fold(const Columns& numbers, int column0) {
    const auto element = [&](int i) { return element_of(numbers, column0, i); };
    const auto present = [&](int i) { return kAll || column0 + fragment_column(i) < data.columns; };
    Frames top[2] = {state[0].frame, state[1].frame};
    find_tops<P, kSize, kAll>(top, row_of_element, element, present);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < P::kSoftmaxes; ++s)
        top[r][s] = R(reduce_lanes<4>(top[r][s].x, [](float a, float b) { return fmaxf(a, b); }));
      scale[r] = state[r].raise(top[r]).factor;
    }
    // As in ProgramFold, the tile's own totals are added to those of all tiles once.
    const Numbers<R, P::kTotals> before[2] = {state[0].sums.total, state[1].sums.total};
#pragma unroll
    for (auto& s : state) s.sums.total = StatisticsSums<P>::none().total;
    constexpr int kPart = 8;  // elements at a time: more of them take more registers than there are
#pragma unroll
    for (int first = 0; first < kSize; first += kPart) {
      add_elements<P, kPart, kAll>(
          state, [](int i) { return row_of_element(i); }, [&](int i) { return element(first + i); },
          [&](int i) { return present(first + i); },
          [&](int i, const ElementStatistics<P>& e, const Frames& weight) {
#pragma unroll
            for (int g = 0; g < P::kWeights; ++g)
              tile[g][first + i] = present(first + i) ? e.payload_weight(g, weight).x : 0.f;
          });
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int k = 0; k < P::kTotals; ++k) state[r].sums.total[k] = before[r][k] + state[r].sums.total[k];
    }
  }
  __device__ __forceinline__ void fold(int number) {
#pragma unroll
    for (int n = 0; n < kScores; ++n) arch::pin(tile[n]);
    const int column0 = number * PayloadFold::kColumns;
    if (column0 + PayloadFold::kColumns <= data.columns)
      fold<true>(numbers[number % 2], column0);
    else
      fold<false>(numbers[number % 2], column0);
  }
  // Loads the numbers of a tile's columns, for the whole warpgroup.
  __device__ __forceinline__ void load_numbers(int number) {
    if constexpr (P::kColumnData + P::kColumnIndices > 0) {
      numbers[number % 2].load(data, number * PayloadFold::kColumns);
      arch::sync_threads(kOneConsumer + warpgroup, kWarpgroup);
    }
  }
  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int g = 0; g < P::kWeights; ++g) round_fragment<E>(operands[g], tile[g]);
  }
  // The factor of a slab's sums in one of the thread's rows, where `of_softmax` has those of softmaxes.
  __device__ __forceinline__ static float of_slab(int slab, const Frames& of_softmax) {
    const int softmax = P::kSoftmaxOf[Slabs::kSum[slab]];
    return softmax < 0 ? 1.f : of_softmax[softmax].x;
  }
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int slab = 0; slab < Slabs::kCount; ++slab) {
      arch::pin(sums[slab]);
      const float factor[2] = {of_slab(slab, scale[0]), of_slab(slab, scale[1])};
      if (__all_sync(0xffffffffu, factor[0] == 1.f && factor[1] == 1.f)) continue;
#pragma unroll
      for (int i = 0; i < kSize; ++i) sums[slab][i] *= factor[row_of_element(i)];
    }
  }

  __device__ __forceinline__ void wait_for_turn() const {
    arch::sync_threads(kTurns + warpgroup, PayloadFold::kConsumers * kWarpgroup);
  }
  __device__ __forceinline__ void end_turn() const {
    arch::arrive_threads(kTurns + (warpgroup + 1) % PayloadFold::kConsumers,
                         PayloadFold::kConsumers * kWarpgroup);
  }

  __device__ __forceinline__ void run(int row0, TileSpan tiles) {
    const int of_scores = row_slabs<kScores>(p);
    load_rows<P>(rows, data, row0);
#pragma unroll
    for (auto& s : state) s = StatisticsSum<P>{}.identity();
#pragma unroll
    for (auto& slab : sums) {
#pragma unroll
      for (float& sum : slab) sum = 0.f;
    }
    arch::wait(&memory.rows_arrived, 0);
    if (warpgroup == PayloadFold::kConsumers - 1)
      arch::arrive_threads(kTurns, PayloadFold::kConsumers * kWarpgroup);
    wait_for_turn();
    multiply_scores();
    end_turn();
    load_numbers(tiles.first);
    arch::wait_wgmma<0>();
    release(of_scores);
    fold(tiles.first);
    round_weights();
#pragma unroll 1
    for (int number = tiles.first + 1; number < tiles.end; ++number) {
      wait_for_turn();
      multiply_scores();
      multiply_payload();
      end_turn();
      load_numbers(number);
      arch::wait_wgmma<1>();
      release(of_scores);
      fold(number);
      arch::wait_wgmma<0>();
      release(Slabs::kCount * kVectors);
      rescale();
      round_weights();
    }
    multiply_payload();
    arch::wait_wgmma<0>();
  }

  // Stores the sums, and the statistics if `results` has a place for them. first: the index of the batch's first
  // row over all batches.
  __device__ __forceinline__ void store(int row0, std::int64_t first, const StatisticsResults& results) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto whole = reduce_lanes<4>(
          state[r], [](const auto& s, const auto& t) { return StatisticsSum<P>{}.combine(s, t); });
      const int row = row0 + fragment_row(r);
      if (row >= data.rows) continue;
      if (p.first_slab == 0 && threadIdx.x % 4 == 0) results.store<P>(first + row, whole);
#pragma unroll
      for (int slab = 0; slab < Slabs::kCount; ++slab) {
        const int count = P::kCountOf[Slabs::kSum[slab]];
        const float mass = count >= 0 && whole.count[count] != 0 ? NAN : of_slab(slab, whole.sums.mass);
        float* const to = p.sums + (first + row) * p.pitch + (p.first_slab + slab) * kSlab;
#pragma unroll
        for (int i = 0; i < kSize; i += 4) {
          const float* const pair = &sums[slab][i + 2 * r];
          *reinterpret_cast<float2*>(to + fragment_column(i)) =
              mass == 0.f ? float2{} : float2{pair[0] / mass, pair[1] / mass};
        }
      }
    }
  }
};

template <class E, class P, class Slabs>
__global__ void __launch_bounds__(PayloadFold::kThreads, 1)
    fold_payload_kernel(const __grid_constant__ PayloadFoldArguments p,
                        const __grid_constant__ ProgramData all,
                        const __grid_constant__ StatisticsResults results) {
  static_assert(Slabs::kCount <= PayloadFold::kPayloadSlabs);
  if (p.wanted != nullptr && *p.wanted == 0) return;
  extern __shared__ unsigned char shared_bytes[];
  __shared__ ColumnNumbers<P, PayloadFold::kColumns> numbers[PayloadFold::kConsumers][2];
  auto& memory = *reinterpret_cast<PayloadFoldMemory*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) {
    memory.ring.init(PayloadFold::kConsumers);
    arch::init(&memory.rows_arrived, 1);
    memory.first_column = std::numeric_limits<int>::max(), memory.end_column = 0;
    arch::fence_init();
  }
  __syncthreads();

  // The last rows first: under a causal mask they need the most columns.
  const int batch = blockIdx.x / p.row_blocks;
  const int row0 = (p.row_blocks - 1 - blockIdx.x % p.row_blocks) * PayloadFold::kRows;
  const ProgramData data = all.of_batch<P>(batch);
  const TileSpan tiles = find_tiles<P>(memory, data, row0);
  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == PayloadFold::kConsumers) {
    arch::setmaxnreg_dec<24>();
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect()) produce<P, Slabs>(p, memory, batch, row0, tiles);
  } else {
    arch::setmaxnreg_inc<240>();
    PayloadConsumer<E, P, Slabs> consumer{p, memory, numbers[warpgroup], data, warpgroup};
    const int own = row0 + warpgroup * kFragmentRows;
    consumer.run(own, tiles);
    consumer.store(own, batch * data.rows, results);
  }
}

}  // namespace monoidreduce::sm90
