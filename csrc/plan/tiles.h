// The sizes of kernels' tiles, as far as plans depend on them. The kernels' sources assert that theirs are the same.
#pragma once

#include <cstdint>

#include "monoidreduce/fold.h"
#include "monoidreduce/launch/contraction_schedule.h"

namespace monoidreduce::tiles {

inline constexpr int kFar = 1 << 30;  // rows and columns are fewer

// Forward passes of losses, by family.
inline constexpr ContractionSizes kSm80Loss{1, 256, 128, 2, 0}, kSm90Loss{2, 256, 256, 1, 0};
inline constexpr ContractionSizes kSm80Distillation{1, 256, 128, 2, 256 * 128},
    kSm90Distillation{2, 256, 192, 1, 0};

// One of three, for widths up to 64, 128 and 256.
template <class T>
constexpr const T& by_width(const T (&tiles)[3], std::int64_t width) {
  return tiles[width <= 64 ? 0 : width <= 128 ? 1 : 2];
}

// Hopper's forward passes of many rows: attention's, where a score has a softcap or a bias of so many bytes; the MLP's.
inline constexpr std::int64_t kFewColumns = 4096;
constexpr TileSize attention_forward(std::int64_t width, std::int64_t columns, bool softcapped,
                                     std::int64_t bias_bytes) {
  if (bias_bytes > 0) return {128, width <= 64 ? 128 : width > 128 ? 64 : bias_bytes == 4 ? 96 : 128};
  if (width > 128) return {128, 80};
  if (width > 64) return {128, softcapped || columns <= kFewColumns ? 128 : 192};
  return {softcapped ? 128 : 192, 128};
}
constexpr TileSize mlp_forward(std::int64_t width) { return {128, width <= 128 ? 128 : 64}; }
// Of forward passes of few rows: columns.
inline constexpr int kFewRowsColumns[] = {128, 128, 64};

// A narrow logsumexp_matmul (Plan::narrow): its largest width, and the numbers of rows and columns that it
// takes, both few or both many. A block goes through all columns, and in d_b through all rows. So few blocks
// and many tiles would leave most multiprocessors idle: of 4096 rows an H100 has blocks for a quarter. At
// most 16 tiles take no longer than the launches that local gradients cost.
inline constexpr std::int64_t kWidestNarrow = 128, kFewLines = 2048, kManyLines = 4096;
// The rows that d_b goes through, in whole units, and the floats that it needs of them.
inline constexpr int kNarrowUnit = 128;
constexpr std::int64_t narrow_rows(std::int64_t rows) {
  return (rows + kNarrowUnit - 1) / kNarrowUnit * kNarrowUnit;
}
constexpr std::int64_t narrow_floats(std::int64_t rows) {
  return 2 * narrow_rows(rows) + narrow_rows(rows) / kNarrowUnit;
}
// Hopper's tile, forward and backward. 32768 rows are 256 of these, which fill 132 multiprocessors twice; of attention's 192 rows
// they are 171.
inline constexpr TileSize kNarrow{128, 128};

// A narrow program without tensor cores (device/simt/program_narrow.cuh): what a lane has of a row, in bytes,
// by vectors; threads of a block, and rows of a group of lanes; columns that are staged at a time; and blocks
// a multiprocessor. With so many blocks, the last ones to finish are few of all.
inline constexpr std::int64_t kRowBytes = 64, kRowVector = 16, kRowThreads = 128, kGroupRows = 4,
                              kRowColumns = 64, kRowBlocks = 16;

// The MLP's forward pass on sm_80, of 16 bits and of floats. blocks: of a multiprocessor.
struct ForwardSizes {
  int rows, columns, blocks;
  bool operator==(const ForwardSizes&) const = default;
};
inline constexpr ForwardSizes kMlpForward[] = {{128, 64, 3}, {128, 64, 2}, {64, 64, 2}};
inline constexpr ForwardSizes kMlpForwardFloats[] = {{128, 64, 2}, {128, 32, 2}, {64, 32, 1}};

// The bytes of shared memory that sm_80's widest tiles take: the MLP's forward pass of floats, and backward passes.
inline constexpr std::int64_t kForwardFloatsBytes = 128 << 10, kBackwardBytes = 147972,
                              kBackwardFloatsBytes = 139524;

// Hopper's backward pass of all gradients at once: tiles, and quads of floats that a thread hands over.
inline constexpr std::int64_t kHandingThreads = 256;
constexpr TileSize at_once(std::int64_t width, bool biased) {
  return {width <= 64 && !biased ? 128 : 64, 128};
}
// Both passes of attention whose scores functions modify. packed: of packed sequences.
constexpr TileSize modified_forward(std::int64_t width, bool packed) {
  return {width <= 64 && !packed ? 192 : 128, 128};
}
constexpr TileSize modified_backward(std::int64_t width, bool packed) { return at_once(width, packed); }
// That of one gradient: lines that stay, and lines that stream past them.
inline constexpr TileSize kPass{128, 64};
// Hidden values in parts, forward and backward; local gradients of losses have the tiles of forward passes.
inline constexpr TileSize kHidden{256, 256}, kHiddenGradient{256, 192};
constexpr std::int64_t handed_quads(std::int64_t width) { return width <= 64 ? 16 : 32; }

}  // namespace monoidreduce::tiles
