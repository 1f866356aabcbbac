// The tile sizes of kernels, as far as plans depend on them. The kernels' sources assert that they use the same sizes.
#pragma once

#include <cstdint>

#include "monoidreduce/fold.h"
#include "monoidreduce/launch/contraction_schedule.h"
#include "monoidreduce/plan.h"

namespace monoidreduce::tiles {

inline constexpr int kFar = 1 << 30;  // tensor-core kernels take fewer rows and columns than this

// The forward passes of losses, by family (ContractionSizes in contraction_schedule.h).
inline constexpr ContractionSizes kSm80Loss{1, 256, 128, 2, 0}, kSm90Loss{2, 256, 256, 1, 0},
    kPlanesLoss{2, 256, 128, 1, 0};
inline constexpr ContractionSizes kSm80Distillation{1, 256, 128, 2, 256 * 128},
    kSm90Distillation{2, 256, 192, 1, 0};
// The same on Hopper for a program over at most kFewRows rows, which one block holds. In clusters of two the other block had
// nothing to do, and a sample of 64 tokens took as long as one of 256: 0.99 ms on an H200 (128256 classes of width 4096).
inline constexpr std::int64_t kFewRows = 128;
inline constexpr ContractionSizes kSm90FewLoss{1, kFewRows, 256, 1, 0},
    kSm90FewDistillation{1, kFewRows, 192, 1, 0};

// Kernels for planes take only products that sum at least this many terms. With fewer, float32 is more accurate: tensor cores align all
// terms of an instruction with the largest one, and cut off the rest. Norms of errors of planes and of float32 products, one after
// the other, on an H200: 8.0e-8 and 5.4e-8 for 8 terms, 9.0e-8 and 1.4e-7 for 64, 1.2e-7 and 4.1e-7 for 512.
inline constexpr std::int64_t kFewestTerms = 64;
// Products of stored local gradients of narrower operands take ordinary cores. They have a tile for all of the width, so that few
// clusters multiply: 32768 rows and columns of width 64 took 25 ms backward on an H200, 24 ms on ordinary cores. If one of two
// scores is narrower, both passes take ordinary cores. A loss of two scores is made of their differences, which show it if the two
// passes round scores in different ways.
inline constexpr std::int64_t kNarrowestOfPlanes = 128;

// One of three, for widths up to 64, 128 and 256.
template <class T>
constexpr const T& by_width(const T (&tiles)[3], std::int64_t width) {
  return tiles[width <= 64 ? 0 : width <= 128 ? 1 : 2];
}

// Hopper's forward passes of many rows. bias_bytes: the size of a score bias, 0 if there is none.
inline constexpr std::int64_t kFewColumns = 4096;
constexpr TileSize attention_forward(std::int64_t width, std::int64_t columns, bool softcapped,
                                     std::int64_t bias_bytes) {
  if (bias_bytes > 0) return {128, width <= 64 ? 128 : width > 128 ? 64 : bias_bytes == 4 ? 96 : 128};
  if (width > 128) return {128, 80};
  if (width > 64) return {128, softcapped || columns <= kFewColumns ? 128 : 192};
  return {softcapped ? 128 : 192, 128};
}
// The same for float32 operands in planes; the MLP's too, of widths up to kWidestPlanes. Attention's scratch begins with a
// counter of jobs; behind it are the planes.
inline constexpr std::int64_t kWidestPlanes = 128, kCounterFloats = 4;
constexpr TileSize resident_planes(std::int64_t width) { return {width <= 64 ? 192 : 128, 64}; }
constexpr TileSize mlp_forward(std::int64_t width) { return {128, width <= 128 ? 128 : 64}; }
// Columns of a tile in Hopper's forward passes of few rows, by width.
inline constexpr int kFewRowsColumns[] = {128, 128, 64};

// A narrow logsumexp_matmul (Plan::narrow): its largest width, and the numbers of rows and columns that it takes. Both must be
// at most kFewLines, or both at least kManyLines. A block goes through all columns (for d_b through all rows). So few blocks
// with many tiles each would leave most SMs idle: 4096 rows make blocks for a quarter of an H100. Up to 16 tiles take no
// longer than the launches that products of dlogits would cost.
inline constexpr std::int64_t kWidestNarrow = 128, kFewLines = 2048, kManyLines = 4096;
// The kernel of d_b goes through the rows in whole units, and needs this many floats of scratch.
inline constexpr int kNarrowUnit = 128;
constexpr std::int64_t narrow_rows(std::int64_t rows) {
  return (rows + kNarrowUnit - 1) / kNarrowUnit * kNarrowUnit;
}
constexpr std::int64_t narrow_floats(std::int64_t rows) {
  return 2 * narrow_rows(rows) + narrow_rows(rows) / kNarrowUnit;
}
// Hopper's tile for it, forward and backward. 32768 rows make 256 such tiles, which fill 132 SMs almost twice. Attention's
// tiles of 192 rows would be 171.
inline constexpr TileSize kNarrow{128, 128};

// The tile of SIMT kernels (device/block/tile.cuh), and its blocks per SM where sums are float.
inline constexpr TileSize kSimt{64, 64};
inline constexpr int kSimtBlocks = 2;

// A narrow program without tensor cores (device/simt/program_narrow.cuh):
//   kRowBytes     bytes of a row's operands that a lane holds in registers, at most
//   kRowVector    bytes of a vector; a lane holds whole vectors
//   kRowThreads   threads of a block
//   kGroupRows    rows that a lane, or a group of lanes, owns
//   kRowColumns   columns that are staged in shared memory at a time
//   kRowBlocks    blocks per SM that the split of the columns aims at: so many that the last ones to finish are few of all
inline constexpr std::int64_t kRowBytes = 64, kRowVector = 16, kRowThreads = 128, kGroupRows = 4,
                              kRowColumns = 64, kRowBlocks = 16;

// The gradients of rows of a program in planes (device/resident/row_gradient_planes_sm90.cuh): the widest rows, the tile, lanes
// that share a row of a fragment (kLanesOfRow of device code), and blocks per SM that the split of the columns aims at.
inline constexpr std::int64_t kWidestOwned = 128, kLanesOfFragment = 4, kRowBlocksOfPlanes = 8;
inline constexpr TileSize kRowGradientPlanes{128, 64};

// Hopper's pass of a program with payload sums (device/resident/fold_payload_sm90.cuh): elements of a slab, the most slabs that
// the rows of both scores may have, and slabs of the payload that a kernel adds up.
inline constexpr std::int64_t kSlab = 64, kRowSlabs = 6, kPayloadSlabs = 3;

// The MLP's forward pass on sm_80, for 16-bit types and for floats, by width. blocks: how many an SM runs at a time.
struct ForwardSizes {
  int rows, columns, blocks;
  bool operator==(const ForwardSizes&) const = default;
};
inline constexpr ForwardSizes kMlpForward[] = {{128, 64, 3}, {128, 64, 2}, {64, 64, 2}};
inline constexpr ForwardSizes kMlpForwardFloats[] = {{128, 64, 2}, {128, 32, 2}, {64, 32, 1}};

// The bytes of shared memory that sm_80's widest tiles take: in the MLP's forward pass for floats, and in backward passes.
inline constexpr std::int64_t kForwardFloatsBytes = 128 << 10, kBackwardBytes = 147972,
                              kBackwardFloatsBytes = 139524;

// Hopper's backward kernel for all gradients at once: its tile, and how many threads hand over partial sums in the stream-K
// fix-up (stream_k_fixup.cuh). Each hands over fixup_quads() times four floats.
inline constexpr std::int64_t kFixupThreads = 256;
constexpr TileSize at_once(std::int64_t width, bool biased) {
  return {width <= 64 && !biased ? 128 : 64, 128};
}
// Attention with a user's score_mod, forward and backward. packed: packed sequences. lean: these, or the gradient of tables.
constexpr TileSize modified_forward(std::int64_t width, bool packed) {
  return {width <= 64 && !packed ? 192 : 128, 128};
}
constexpr TileSize modified_backward(std::int64_t width, bool lean) { return at_once(width, lean); }
// The forward pass of the same for float32 operands in planes.
inline constexpr TileSize kModifiedPlanes{128, 64};
// Hopper's backward kernels for one gradient: lines that stay on chip, and lines that stream past them.
inline constexpr StreamedTile kPass{128, 64};
// The hidden values of an MLP in parts, forward and backward. (dlogits of losses have the tiles of their forward passes.)
// Those of float32 operands in planes have one tile for both.
inline constexpr TileSize kHidden{256, 256}, kHiddenGradient{256, 192}, kHiddenPlanes{256, 128};
constexpr std::int64_t fixup_quads(std::int64_t width) { return width <= 64 ? 16 : 32; }

}  // namespace monoidreduce::tiles
