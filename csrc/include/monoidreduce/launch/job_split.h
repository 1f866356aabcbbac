// How the jobs (work tiles) of a backward pass on Hopper are split between blocks, so that all blocks end at about the same
// time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/schedule/parts.h"
#include "monoidreduce/device/schedule/stream_k_tail.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce {

// Whether the bias is a mask: a bool tensor, in which false masks an element.
inline bool excludes(const TensorView& bias) { return bias.present() && bias.dtype == DType::kBool; }

// Whether elements may be masked, by the column range or by the bias.
inline bool may_mask(const FoldProblem& p) { return !p.range.all() || excludes(p.bias); }

inline std::int64_t column_jobs(TileSize tile, const FoldProblem& p) {
  return p.batch() * p.column_heads() * parts_of(p.columns(), tile.columns);
}

// The cost of a part of a job beyond its own tiles, in row tiles: about that of starting a block. (H100, width 128: 4.6 us, a
// tile takes 2.0; from whole backward passes of 2k and 4k tokens.)
inline constexpr std::int64_t kTilesOfPart = 2;

// How the jobs of the last wave are split, for attention without a mask. tile: rows and columns of a tile.
//
// In the deterministic mode no job is split. Parts would start at the same time, in the middle of rows, and wait for the blocks
// that add to these rows before them. (16k tokens: 19 ms. A model with the same result puts more than half of that into the
// last of 16 waves.)
inline StreamKTail backward_stream_k_tail(TileSize tile, const FoldProblem& p, const DeviceFacts& gpu) {
  if (may_mask(p)) return {};
  return stream_k_tail(column_jobs(tile, p), parts_of(p.rows(), tile.rows), gpu.multiprocessors,
                       kTilesOfPart);
}

// How every job is split if jobs differ in length, as under a causal mask. In a window most jobs are equally long, and stay whole.
// Jobs of packed sequences stay whole too: the host, which splits jobs, does not know the sequences' lengths.
//
// Grouped queries: blocks that begin the heads of a group together move apart from head to head, because their jobs have
// different lengths. Then they read different rows, and the L2 cache has room for those of about kHeadsOfPart heads.
//
// Few jobs: a block's even share of all tiles is less than the longest job. Then rows are split too, so that it is about as long.
inline PartsOfJob backward_parts(TileSize tile, const FoldProblem& p, const DeviceFacts& gpu) {
  constexpr std::int64_t kHeadsOfPart = 2, kLeastTiles = 8 * kTilesOfPart;
  const ColumnRange& range = p.range;
  const bool earlier = range.left != ColumnRange::kUnbounded, later = range.right != ColumnRange::kUnbounded;
  if (range.listed || earlier == later) return {};
  const auto tiles_of = [&](std::int64_t first) {
    const std::int64_t last = std::min(first + tile.columns, p.columns()) - 1, shift = p.range.shift;
    const std::int64_t begin = later ? std::max<std::int64_t>(first - shift - range.right, 0) : 0,
                       end = earlier ? std::min(last - shift + range.left + 1, p.rows()) : p.rows();
    return std::max<std::int64_t>(parts_of(end, tile.rows) - begin / tile.rows, 0);
  };
  const std::int64_t group = p.heads() / p.column_heads(), column_tiles = parts_of(p.columns(), tile.columns);
  const std::int64_t longest = tiles_of(later ? 0 : (column_tiles - 1) * tile.columns);
  const auto parts = [](std::int64_t wanted, std::int64_t most, std::int64_t tiles) {
    return std::max<std::int64_t>(std::min({wanted, most, tiles / kLeastTiles}), 1);
  };
  const std::int64_t of_heads = parts(parts_of(group, kHeadsOfPart), group, longest * group);
  const std::int64_t column_heads = p.batch() * p.column_heads() * of_heads;
  // (H200, 6 heads of 4096 tokens: 192 jobs take 0.335 ms whole, and 0.379 in parts.)
  if (column_heads * column_tiles >= gpu.multiprocessors) return {int(of_heads), 1};
  std::int64_t all = 0;
  for (std::int64_t n = 0; n < column_tiles; ++n) all += tiles_of(n * tile.columns);
  all = std::max<std::int64_t>(all * column_heads, 1);
  const std::int64_t rounded = (2 * longest * gpu.multiprocessors + all) / (2 * all);
  return {int(of_heads), int(parts(rounded, longest, longest * parts_of(group, of_heads)))};
}

struct JobSplit {
  StreamKTail tail = {};
  PartsOfJob parts = {};  // of each job that is not in the tail
  int slots = 0;          // of the fix-up (stream_k_fixup.cuh)
};
// even: whether all jobs are equally long.
inline JobSplit backward_job_split(TileSize tile, const FoldProblem& p, bool even, const DeviceFacts& gpu) {
  if (even) {
    const StreamKTail tail = backward_stream_k_tail(tile, p, gpu);
    return {tail, {}, tail.blocks};
  }
  const PartsOfJob parts = backward_parts(tile, p, gpu);
  // Parts of a job are taken one after another, so few wait to be joined. But those of one job need a slot each.
  const std::int64_t others = parts.count() - 1,
                     most = std::max<std::int64_t>(2 * gpu.multiprocessors, others);
  return {{}, parts, static_cast<int>(std::min(column_jobs(tile, p) * others, most))};
}

}  // namespace monoidreduce
