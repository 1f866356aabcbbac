// One gradient of a fold with a payload on Hopper, for float32 operands of a width up to 256, with float32's
// accuracy: by fp16 planes (block/planes_sm90.cuh).
//
// The lines whose gradient is computed stay in shared memory, the others stream, as in
// fold_backward_pass_sm90.cuh, whose table says which product is made of what. A gradient has a single writer,
// so its bits are the same in every run. Consumers take turns: while one computes derivatives, the other multiplies. Two blocks
// share a width over 128, as in fold_forward_planes_sm90.cuh.
#pragma once

#include "monoidreduce/device/block/bias_fragment.cuh"
#include "monoidreduce/device/block/planes_sm90.cuh"
#include "monoidreduce/device/block/shared_width_sm90.cuh"
#include "monoidreduce/device/program/plane_scores.cuh"
#include "monoidreduce/device/resident/fold_backward_pass_sm90.cuh"
#include "monoidreduce/device/resident/row_fragment.cuh"

namespace monoidreduce::sm90 {

// kWidth: of all operands in a block, a multiple of 64. kTransposed_: the payload's gradient is [payload width, columns] in
// memory, as in the MLP. kBlocks, kSlots: as in PlanesTile. A third consumer was tried at width 64
// (docs/design/tried_and_dropped.md).
template <GradientOf kOf_, int kWidth_, int kStages_, bool kTransposed_, int kBlocks_ = 1, int kSlots_ = 1>
struct PlanesPassTile {
  static constexpr GradientOf kOf = kOf_;
  static constexpr bool kOfRows = kOf == GradientOf::kRows, kOfPayload = kOf == GradientOf::kPayload;
  static constexpr bool kTransposed = kTransposed_ && kOfPayload;
  static constexpr int kWidth = kWidth_, kConsumers = 2, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_, kSlots = kSlots_;
  static constexpr int kStreamed = kPlaneLines, kStaying = kFragmentRows * kConsumers;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
};

// What the backward pass knows of each row: P_i (log-sum-exp) in two words, and RowPolicy::upstream (centre)
// times the unit of the scores. A sum (the MLP) needs nothing of its rows, and kernels do not read this.
struct PlaneResiduals {
  static constexpr int kValues = 3;  // for each row
  float* values;                     // [batch, heads, padded_rows / 64, kValues, 64]
  int padded_rows;                   // a multiple of 64

  // Those of 64 rows.
  __device__ __forceinline__ float* of(std::int64_t batch_head, int row0) const {
    return values + (batch_head * padded_rows + row0) * kValues;
  }
};

struct PlanesPassArguments {
  PlaneMaps staying[2], streamed[2];  // the second: of u; for the payload's gradient, what is summed
  OutputRows gradient;                // float32; transposed, stride[2] is that of the width
  float* d_column_bias;               // [columns], written by the pass of the columns; or null
  PlaneResiduals residuals;
  RowMarks marks;
  FoldShape shape;
};

// With a block mask, the tile of streamed lines in a stage: its head and first line. whole: by the block mask, all
// lines that stay keep the whole tile. last: no tile of the job follows.
struct PassStep {
  int head, line;
  bool whole, last;
};

// Iterates over the tiles of a job, head by head. With a block mask it skips those that hold no score.
template <class Tile, class Scores>
struct PassTiles {
  const PassJob<Tile>& job;
  const Scores& scores;
  int head, tile;

  __device__ __forceinline__ PassTiles(const PassJob<Tile>& job, const Scores& scores)
      : job(job), scores(scores), head(job.first_head), tile(job.first_tile) {
    find();
  }
  __device__ __forceinline__ bool done() const { return head >= job.end_head; }
  __device__ __forceinline__ void advance() {
    ++tile;
    find();
  }
  __device__ __forceinline__ bool whole() const {
    if constexpr (SkipsBlocks<Scores>)
      return strip().template whole<Tile::kStreamed>(tile);
    else
      return false;
  }

 private:
  __device__ __forceinline__ auto strip() const {
    if constexpr (Tile::kOfRows)
      return scores.strip_of_rows(job.batch, job.staying_head, job.line0, Tile::kStaying);
    else
      return scores.strip_of_columns(job.batch, head, job.line0, Tile::kStaying);
  }
  // Moves to the next tile that counts, starting with the current one.
  __device__ __forceinline__ void find() {
    for (; !done(); ++head, tile = job.first_tile) {
      if constexpr (SkipsBlocks<Scores>) tile = strip().template next<Tile::kStreamed>(tile, job.end_tile);
      if (tile < job.end_tile) return;
    }
  }
};

template <class Tile>
struct PlanesPassMemory {
  using Operand = PlaneTile<Tile::kWidth>;
  static constexpr int kOperands = Tile::kOfPayload ? 1 : 2;  // that stay
  Operand staying[Tile::kConsumers][kOperands], first[Tile::kStages], second[Tile::kStages];
  float residuals[Tile::kStages][PlaneResiduals::kValues][kPlaneLines];  // of the rows that stream
  Ring<Tile::kStages, ReadBy::kThreads> first_ring, second_ring;
  PartialDotsMemoryOf<Tile> partial_dots;
  arch::Mbarrier stayed;
  PassJob<Tile> job;
  bool empty;                     // with a block mask: no tile of the job holds a score
  PassStep steps[Tile::kStages];  // with a block mask: one for each stage
};

// The producer: loads the tiles of the job. Called by one thread.
template <bool kResiduals, class Tile, class Scores>
__device__ __forceinline__ void produce_planes(const PlanesPassArguments& p, const PassJob<Tile>& job,
                                               const Scores& scores, PlanesPassMemory<Tile>& memory) {
  using Memory = PlanesPassMemory<Tile>;
  using Operand = typename Memory::Operand;
  constexpr int kResidualBytes = kResiduals && !Tile::kOfRows ? sizeof memory.residuals[0] : 0;
  const int part = first_of_part<Tile>();
  arch::arrive_expect(&memory.stayed, Tile::kConsumers * Memory::kOperands * Operand::kBytes);
  for (int w = 0; w < Tile::kConsumers; ++w)
    for (int n = 0; n < Memory::kOperands; ++n)
      memory.staying[w][n].load(
          p.staying[n], {part, job.line0 + w * kFragmentRows, job.staying_head, job.batch}, &memory.stayed);
  RingPosition<Tile::kStages> at;
  // Loads a tile. write(): what is written to the stage before.
  const auto load = [&](int head, int line, auto write) {
    const arch::Box box{part, line, head, job.batch};
    const auto load_first = [&](auto write) {
      arch::Mbarrier* const arrived = memory.first_ring.acquire(at, Operand::kBytes + kResidualBytes, write);
      memory.first[at.stage].load(p.streamed[0], box, arrived);
      if constexpr (kResidualBytes > 0)
        arch::load(memory.residuals[at.stage],
                   p.residuals.of(std::int64_t{job.batch} * p.shape.heads + head, line), kResidualBytes,
                   arrived);
    };
    const auto load_second = [&](auto write) {
      memory.second[at.stage].load(p.streamed[1], box,
                                   memory.second_ring.acquire(at, Operand::kBytes, write));
    };
    // In the order in which stages become free.
    if constexpr (Tile::kOfPayload)
      load_first(write), load_second([] {});
    else
      load_second(write), load_first([] {});
    at.advance();
  };
  if constexpr (SkipsBlocks<Scores>) {
    PassTiles<Tile, Scores> tiles(job, scores);
#pragma unroll 1
    while (!tiles.done()) {
      PassStep step{tiles.head, tiles.tile * Tile::kStreamed, tiles.whole(), false};
      tiles.advance();
      step.last = tiles.done();
      load(step.head, step.line, [&] { memory.steps[at.stage] = step; });
    }
  } else {
    for (int head = job.first_head; head < job.end_head; ++head) {
#pragma unroll 1
      for (int tile = job.first_tile; tile < job.end_tile; ++tile) load(head, tile * Tile::kStreamed, [] {});
    }
  }
}

// Adds factor * g to the gradient of the bias of scores, in global memory. g: the thread's derivatives of a tile
// that begins at row0 and column0, 0 where an element is masked. owned: no two scores share an element of the bias,
// which is then stored; otherwise the additions are atomic.
template <int kSize>
__device__ __forceinline__ void add_bias_gradient(const Matrix<float>& to, bool owned, float factor,
                                                  const float (&g)[kSize], int row0, int column0) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const int row = row0 + fragment_row(row_of_element(i)), column = column0 + fragment_column(i);
    if (row >= to.rows() || column >= to.width()) continue;
    float* const element = reinterpret_cast<float*>(to.at(row, column));
    if (owned)
      *element = g[i] * factor;
    else
      atomicAdd(element, g[i] * factor);
  }
}

template <class S, class M>
concept PlanesPassScores = PassScores<S, M> || kBiasedInMemory<S> || kOfPrograms<S>;

template <class Tile, TileMonoid M, PlanesPassScores<M> Scores>
struct PlanesPassConsumer {
  using R = typename M::Real;
  using Memory = PlanesPassMemory<Tile>;
  using Operand = typename Memory::Operand;
  static constexpr int kWidth = Tile::kWidth, kStreamed = Tile::kStreamed;
  static constexpr int kTurns = 1;  // named barrier kTurns + w: consumer w may issue its products
  // After so many tiles, sums are added to the gradient in memory: a long sequential sum would lose digits.
  // (An MLP of 25345 rows: d_w1 had 2.3 times the largest error of torch's.)
  static constexpr int kTilesOfSum = 64;
  static constexpr bool kResiduals = !std::is_empty_v<typename M::Frame>;
  static constexpr bool kSumsBias = Tile::kOf == GradientOf::kColumns && kBiasedByColumn<Scores>;
  // Whether biases of scores are read before the tile's product: it takes registers that the others lack.
  static constexpr bool kReadsAhead = Tile::kOfPayload || kWidth == 64;
  // Whether u is exchanged with the other block while scores are multiplied: it takes registers too.
  static constexpr bool kAddsAhead = !kBiasedInMemory<Scores>;
  // The pass of the rows adds the gradients of biases of scores. If all rows of a head share a bias, the pass
  // of the columns sums them first.
  static constexpr bool kAddsBiases = Tile::kOfRows && kHasBiasGradient<Scores>;
  static constexpr bool kSumsSharedBiases = Tile::kOf == GradientOf::kColumns && kHasBiasGradient<Scores>;
  // The pass of the rows sums the gradients of tables that scores gather from by row.
  static constexpr bool kSumsTables = Tile::kOfRows && kSumsRowTables<Scores>;
  struct Nothing {};
  template <class S>
  static auto row_tables() {
    if constexpr (kSumsTables)
      return typename S::RowTables{};
    else
      return Nothing{};
  }

  const M& m;
  const Scores& scores_of;
  const PlanesPassArguments& p;
  const PassJob<Tile>& job;
  Memory& memory;

  float scores[kStreamed / 2], u[kStreamed / 2], sums[kWidth / 2];
  float own_residuals[PlaneResiduals::kValues][2];  // of the rows that stay
  float d_bias[2] = {0.f, 0.f};                     // sums of the columns that stay
  bool stored = false;                              // whether the gradient has the sums of tiles before
  [[no_unique_address]] decltype(row_tables<Scores>()) of_tables{};
  PartialDotsOf<Tile> partial_dots{};

  // The number of this consumer; every lane of a warp must call it. A shuffle computes it anew in each tile. If a
  // variable held it, the compiler would compute the addresses of all products before the loop, and spill them.
  __device__ __forceinline__ static int warpgroup() { return arch::uniform(threadIdx.x / kWarpgroup); }
  __device__ __forceinline__ int own_line() const { return job.line0 + warpgroup() * kFragmentRows; }
  __device__ __forceinline__ void wait_for_turn() const {
    arch::sync_threads(kTurns + warpgroup(), 2 * kWarpgroup);
  }
  __device__ __forceinline__ void end_turn() const {
    arch::arrive_threads(kTurns + (warpgroup() + 1) % Tile::kConsumers, 2 * kWarpgroup);
  }

  // The scale of one of the thread's two lines of an operand that stays.
  __device__ __forceinline__ float own_scale(int which, int r) const {
    return memory.staying[warpgroup()][which].scales[fragment_row(r)].scale;
  }

  // dots = this consumer's staying lines . streamed^T, over the width that this block has. Calls meanwhile() while tensor
  // cores multiply.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(float (&dots)[kStreamed / 2], int which, const Operand& streamed,
                                           Meanwhile meanwhile) {
    PlaneDots<kWidth> product;
    wait_for_turn();
    product.multiply(memory.staying[warpgroup()][which], streamed);
    end_turn();
    meanwhile();
    arch::wait_wgmma<0>();
    product.scaled(dots, {own_scale(which, 0), own_scale(which, 1)}, streamed.scales);
  }

  // If two blocks share the width, adds the other one's dot products to dots.
  __device__ __forceinline__ void add_other_block(float (&dots)[kStreamed / 2]) {
    if constexpr (Tile::kBlocks > 1) partial_dots.add(dots, memory.partial_dots, warpgroup());
  }

  // The scores of a tile of the lines that stream past. whole: the block mask keeps all of them.
  __device__ __forceinline__ decltype(auto) scores_of_tile(int head, int line, bool whole) const {
    if constexpr (Tile::kOfRows) head = job.staying_head;
    if constexpr (kOfPrograms<Scores>) {
      constexpr bool kOfColumns = Tile::kOf == GradientOf::kColumns;
      auto scores_here = scores_of.template pulled<!Tile::kOfRows, kOfColumns>(
          job.batch, head, Tile::kOfRows ? own_line() : line, Tile::kOfRows ? line : own_line());
      scores_here.find_kept(whole);
      if constexpr (kSumsTables) {
        if (!p.shape.keeps_all(own_line(), kFragmentRows, line, kStreamed)) {
          Kept band[2];
          find_unmasked_columns(band, p.shape, [&](int of) { return own_line() + of; }, line);
          scores_here.restrict_to(band);
        }
      }
      return scores_here;
    } else {
      return pulled_with_biases<!Tile::kOfRows, kStreamed / 2, kReadsAhead>(scores_of, job.batch, head,
                                                                            own_line(), line);
    }
  }

  // Replaces scores and u by weights and dz, the derivative with respect to the dot product. scores_here: of
  // this tile.
  template <class ScoresHere>
  __device__ __forceinline__ void pull_tile(const ScoresHere& scores_here, int stage, int line) {
    if constexpr (Tile::kOfPayload) {
#pragma unroll
      for (float& x : u) x = 0.f;
    }
    const auto& streamed = memory.residuals[stage];
    const auto residual = [&](int i) {
      if constexpr (!kResiduals) {
        return RowResidual<M>{};
      } else if constexpr (Tile::kOfRows) {
        const int r = row_of_element(i);
        return RowResidual<M>{{R(own_residuals[0][r]), R(own_residuals[1][r])}, R(own_residuals[2][r])};
      } else {
        const int row = fragment_column(i);
        return RowResidual<M>{{R(streamed[0][row]), R(streamed[1][row])}, R(streamed[2][row])};
      }
    };
    const FoldShape& shape = p.shape;
    [[maybe_unused]] float of_scores[kStreamed / 2];  // derivatives with respect to the scores
    if constexpr (Tile::kOfRows) {
      scores_here.prepare(scores, own_line(), line);
    } else {
      scores_here.prepare_transposed(scores, line, own_line());
    }
    if constexpr (kAddsBiases) {
      pull_fragment(m, scores_here, residual, scores, u, [&](int i, float g) { of_scores[i] = g; });
    } else if (sums_shared_biases()) {
      Kept kept[2];
      float of_tile[2] = {0.f, 0.f};
      find_unmasked_rows(kept, shape, line, own_line());
      pull_fragment(m, scores_here, residual, scores, u, [&](int i, float g) {
        const int r = row_of_element(i);
        if (kept[r](i)) of_tile[r] += g;
      });
      d_bias[0] += of_tile[0], d_bias[1] += of_tile[1];
    } else if constexpr (kSumsTables) {
      pull_fragment(m, scores_here, residual, scores, u, [&](int i, float g) {
        of_tables.add(i, scores_here.element(scores[i], i), scores_here.counts(i) ? g : 0.f);
      });
    } else if constexpr (HasTableGradient<ScoresHere>) {
      Kept kept[2];
      find_unmasked_rows(kept, shape, line, own_line());
      pull_fragment(m, scores_here, residual, scores, u, shape.rows, kept, Unseen{});
    } else {
      pull_fragment(m, scores_here, residual, scores, u);
    }
    const bool full = Tile::kOfRows ? shape.keeps_all(own_line(), kFragmentRows, line, kStreamed)
                                    : shape.keeps_all(line, kStreamed, own_line(), kFragmentRows);
    if (!full) {
      Kept kept[2];
      if constexpr (Tile::kOfRows) {
        find_unmasked_columns(kept, shape, [&](int of) { return own_line() + of; }, line);
      } else {
        find_unmasked_rows(kept, shape, line, own_line());
      }
      clear_fragment(kept, Tile::kOfPayload ? scores : u);
      if constexpr (kAddsBiases) clear_fragment(kept, of_scores);
    }
    scores_here.finish_transposed(scores, u, line, own_line());
    if constexpr (kAddsBiases) {
      const auto& biases = scores_of.with_biases;
      if (biases.d_bias.data && !biases.rows_share && block_of_cluster<Tile>() == 0)
        add_bias_gradient(Matrix<float>(biases.d_bias, job.batch, job.staying_head), biases.owns_d_bias,
                          1.f / biases.natural_scale, of_scores, own_line(), line);
    }
    if constexpr (kSumsBias) {
      float of_tile[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kStreamed / 2; ++i) of_tile[row_of_element(i)] += u[i];
      d_bias[0] += of_tile[0], d_bias[1] += of_tile[1];
    }
  }

  __device__ __forceinline__ bool sums_shared_biases() const {
    if constexpr (kSumsSharedBiases)
      return scores_of.with_biases.d_bias.data && scores_of.with_biases.rows_share;
    return false;
  }
  // Adds the sums of the gradients of biases that the rows of a head share to global memory.
  __device__ __forceinline__ void add_shared_biases(int head) {
    if constexpr (kSumsSharedBiases) {
      const auto& biases = scores_of.with_biases;
      const Matrix<float> to(biases.d_bias, job.batch, head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = reduce_lanes<kLanesOfRow>(d_bias[r], [](float a, float b) { return a + b; });
        const int column = own_line() + fragment_row(r);
        if (block_of_cluster<Tile>() == 0 && threadIdx.x % kLanesOfRow == 0 && column < to.width())
          atomicAdd(reinterpret_cast<float*>(to.at(0, column)), sum * (1.f / biases.natural_scale));
        d_bias[r] = 0.f;
      }
    }
  }

  // sums += pulled . streamed
  __device__ __forceinline__ void accumulate(float (&pulled)[kStreamed / 2], const Operand& streamed) {
    PlaneWeights weights;
    PlaneSums<kWidth> of_tile;
    weights.split(pulled, streamed.scales);
    wait_for_turn();
    of_tile.multiply(weights, streamed);
    end_turn();
    arch::wait_wgmma<0>();
    of_tile.add_to(sums, weights);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    arch::wait(&memory.stayed, 0);
    if constexpr (kResiduals && Tile::kOfRows) {
      const float* const own =
          p.residuals.of(std::int64_t{job.batch} * p.shape.heads + job.staying_head, own_line());
#pragma unroll
      for (int n = 0; n < PlaneResiduals::kValues; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) own_residuals[n][r] = own[n * kPlaneLines + fragment_row(r)];
      }
    }
    if (warpgroup() == Tile::kConsumers - 1) arch::arrive_threads(kTurns, 2 * kWarpgroup);
    RingPosition<Tile::kStages> at;
    int tiles = 0;  // in the sums
    if constexpr (SkipsBlocks<Scores>) {
#pragma unroll 1
      for (bool more = !memory.empty; more; at.advance()) {
        (Tile::kOfPayload ? memory.first_ring : memory.second_ring).wait(at);
        const PassStep step = memory.steps[at.stage];
        add_tile(step.head, step.line, step.whole, at, tiles);
        more = !step.last;
      }
    } else {
      for (int head = job.first_head; head < job.end_head; ++head) {
#pragma unroll 1
        for (int tile = job.first_tile; tile < job.end_tile; ++tile, at.advance())
          add_tile(head, tile * kStreamed, false, at, tiles);
        if (sums_shared_biases()) add_shared_biases(head);
      }
    }
  }

  // Adds the tile of a stage to the sums. tiles: how many these have.
  __device__ __forceinline__ void add_tile(int head, int line, bool whole, RingPosition<Tile::kStages> at,
                                           int& tiles) {
    if (tiles++ == kTilesOfSum) {
      if (sums_shared_biases()) add_shared_biases(head);
      if (p.gradient.data) {  // else the sums stay: finish() must see what is not finite
        store_sums();
#pragma unroll
        for (float& sum : sums) sum = 0.f;
        stored = true;
      }
      tiles = 1;
    }
    const Operand &first = memory.first[at.stage], &second = memory.second[at.stage];
    if constexpr (Tile::kOfPayload) {
      const auto& scores_here = scores_of_tile(head, line, whole);
      memory.first_ring.wait(at);
      multiply(scores, 0, first, [] {});
      add_other_block(scores);
      pull_tile(scores_here, at.stage, line);
      memory.first_ring.release(at);
      memory.second_ring.wait(at);
      accumulate(scores, second);
      memory.second_ring.release(at);
    } else {
      memory.second_ring.wait(at);
      multiply(u, 1, second, [] {});
      memory.second_ring.release(at);
      const auto& scores_here = scores_of_tile(head, line, whole);
      memory.first_ring.wait(at);
      if constexpr (!kAddsAhead) add_other_block(u);
      multiply(scores, 0, first, [&] {
        if constexpr (kAddsAhead) add_other_block(u);
      });
      add_other_block(scores);
      pull_tile(scores_here, at.stage, line);
      accumulate(u, first);
      memory.first_ring.release(at);
    }
  }

  // Writes the sums to the gradient. If it has those of tiles before, they become the sums of all of them.
  __device__ __forceinline__ void store_sums() {
    if constexpr (Tile::kOfPayload) keep_sums(scores_of, sums);
    const int own = own_line(), lines = Tile::kOfRows ? p.shape.rows : p.shape.columns;
    const int first = block_of_cluster<Tile>() * kWidth;  // of the gradient's width
    const OutputRows& out = p.gradient;
    const std::int64_t across = Tile::kTransposed ? out.stride[2] : 1,
                       along = Tile::kTransposed ? 1 : out.stride[2];
    float* const of_head =
        static_cast<float*>(out.data) + job.batch * out.stride[0] + job.staying_head * out.stride[1];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int line = own + fragment_row(r);
      if (line >= lines) continue;
      float* const to = of_head + line * along + (first + fragment_column(0)) * across;
#pragma unroll
      for (int i = 0; i < kWidth / 2; i += 4) {
        if (first + 2 * i >= out.width) continue;
        float &x = sums[i + 2 * r], &y = sums[i + 2 * r + 1];
        float *const to_x = to + 2 * i * across, *const to_y = to_x + across;
        if (stored) x += *to_x, y += *to_y;
        if constexpr (Tile::kTransposed)
          *to_x = x, *to_y = y;
        else
          store_pair(to_x, x, y);
      }
    }
  }

  __device__ __forceinline__ void finish() {
    store_sums();
    if constexpr (kSumsTables) of_tables.finish(scores_of_tile(0, 0, true), 1.f / scores_of.data.scale);
    const int own = own_line();
    const int lines = Tile::kOfRows ? p.shape.rows : p.shape.columns;
    // Sums may be finite though a line that stays is not: relu of a NaN score has the derivative 1.
    bool finite = is_finite(sums) && is_finite(d_bias);
#pragma unroll
    for (int n = 0; n < Memory::kOperands; ++n)
      finite = finite && is_finite({own_scale(n, 0), own_scale(n, 1)});
    if (!finite && own < lines) {
      const int heads = Tile::kOfRows ? p.shape.heads : p.shape.heads / p.shape.group;
      const std::int64_t head = std::int64_t{job.batch} * heads + job.staying_head;
      (Tile::kOfRows ? p.marks.row(head, own) : p.marks.column(head, own)) = 1.f;
    }
    if constexpr (kSumsBias) {
      if (!p.d_column_bias) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = reduce_lanes<kLanesOfRow>(d_bias[r], [](float a, float b) { return a + b; });
        const int column = own + fragment_row(r);
        if (threadIdx.x % kLanesOfRow == 0 && column < lines) p.d_column_bias[column] = sum;
      }
    }
  }
};

template <class Tile, class M, class Scores>
__global__ void __cluster_dims__(Tile::kBlocks) __launch_bounds__(Tile::kThreads, 1)
    fold_backward_planes_kernel(const __grid_constant__ PlanesPassArguments p, const __grid_constant__ M m,
                                const __grid_constant__ Scores scores) {
  extern __shared__ unsigned char shared_bytes[];
  using Consumer = PlanesPassConsumer<Tile, M, Scores>;
  auto& memory = *reinterpret_cast<typename Consumer::Memory*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) {
    memory.job = PassJob<Tile>(p.shape, blockIdx.x / Tile::kBlocks);
    if constexpr (SkipsBlocks<Scores>) memory.empty = PassTiles<Tile, Scores>(memory.job, scores).done();
    memory.first_ring.init(Tile::kConsumers);
    memory.second_ring.init(Tile::kConsumers);
    memory.partial_dots.init();
    arch::init(&memory.stayed, 1);
    arch::fence_init();
  }
  sync_cluster<Tile>();

  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == Tile::kConsumers) {
    arch::setmaxnreg_dec<24>();
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect())
      produce_planes<Consumer::kResiduals>(p, memory.job, scores, memory);
  } else {
    arch::setmaxnreg_inc<240>();
    Consumer consumer{m, scores, p, memory.job, memory};
    consumer.run();
    consumer.finish();
  }
}

// Gathers the residuals of rows, 64 at a time. lse, lse_low, centre: [batch heads, rows]. Rows beyond the last,
// and rows without columns, get weights of 0. One thread for each padded row.
static __global__ void __launch_bounds__(256)
    gather_residuals(const float* lse, const float* lse_low, const float* centre, float unit, int rows,
                     std::int64_t padded, const __grid_constant__ PlaneResiduals to) {
  const std::int64_t n = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (n >= padded) return;
  const std::int64_t batch_head = n / to.padded_rows;
  const int row = static_cast<int>(n - batch_head * to.padded_rows);
  float product = INFINITY, low = 0.f, upstream = 0.f;
  if (row < rows) {
    const std::int64_t at = batch_head * rows + row;
    if (lse[at] != -INFINITY)
      product = softmax_product(lse[at], centre[at]), low = lse_low[at], upstream = centre[at] * unit;
  }
  float* const own = to.of(batch_head, row / kPlaneLines * kPlaneLines) + row % kPlaneLines;
  own[0] = product, own[kPlaneLines] = low, own[2 * kPlaneLines] = upstream;
}

}  // namespace monoidreduce::sm90
