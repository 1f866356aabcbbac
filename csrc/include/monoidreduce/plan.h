// How a call runs on a GPU, as plain data. A plan is made once, by plan() in operators.h, before the caller allocates anything.
// Then it is passed to the call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "monoidreduce/device/schedule/packing.h"
#include "monoidreduce/device/schedule/parts.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce {

// The families of kernels: ordinary (SIMT) kernels, which take every call; mma.sync kernels for tensor cores from compute
// capability 8.0 on; wgmma and TMA kernels for Hopper; and of these, those that multiply float32 operands as planes of float16.
enum class Family : std::int8_t { kSimt, kSm80, kSm90, kPlanes };

// One row of the table of families: which GPUs and calls a family is for, and what a caller may ask of it.
struct Capabilities {
  const char* name;
  int major = 0;             // least compute capability (major)
  bool exact_major = false;  // only exactly major.0, no later GPU
  // Attention and the MLP: the widest rows (head dimension, MLP width) that fit in shared memory. 0: no limit.
  std::int64_t widest = 0;
  bool tf32 = false;          // attention and the MLP take float32 operands, rounded to tf32
  bool tensor_cores = false;  // operand sizes must be multiples of 8, and lines dense
  bool multiplies = false;    // has kernels that multiply dlogits (rows_product, columns_product)
  bool planes = false;        // float32 operands come as planes of float16 (ops/planes.h)
  bool keeps = false;         // forward can save dlogits for backward
  bool skips_rows = false;    // skips rows that are not active, given their order
  bool transposed = false;    // reads a transposed weight of a loss in place
  // Loads score biases in tiles by TMA: their rows must be dense and on 16-byte boundaries.
  bool bias_in_tiles = false;
  bool clusters = false;  // a contraction tile is shared by a cluster, of two CTAs unless there are few rows
  // Kernels for a user's score_mod are compiled in variants: for packed sequences, and for a fixed order of sums. They can also
  // apply a bias that is linear in the position to dot products, without computing each score.
  bool score_mod_variants = false;
  const char* architecture = nullptr;  // what user programs are compiled for; null: the GPU's own
};
inline constexpr Capabilities kFamilies[] = {
    {.name = "simt"},
    {.name = "sm80", .major = 8, .widest = 256, .tf32 = true, .tensor_cores = true},
    {.name = "sm90",
     .major = 9,
     .exact_major = true,
     .widest = 256,
     .tensor_cores = true,
     .multiplies = true,
     .keeps = true,
     .skips_rows = true,
     .transposed = true,
     .bias_in_tiles = true,
     .clusters = true,
     .score_mod_variants = true,
     .architecture = "sm_90a"},
    {.name = "planes",
     .major = 9,
     .exact_major = true,
     .tensor_cores = true,
     .multiplies = true,
     .planes = true,
     .clusters = true,
     .architecture = "sm_90a"},
};

// Why a call does not run on a family of kernels: a text in which each "{}" stands for the next of the numbers.
struct Reason {
  const char* text = nullptr;
  double numbers[3] = {};
  constexpr Reason() = default;
  template <class... Number>
  constexpr Reason(const char* text, Number... number)
      : text(text), numbers{static_cast<double>(number)...} {}
  explicit operator bool() const { return text != nullptr; }
};

// The fastest family that takes a call. The reasons say what excludes the faster ones: `both` excludes both tensor-core
// families, otherwise sm90 and sm80 have their own.
struct Choice {
  Family family = Family::kSimt;
  Reason both = {}, sm90 = {}, sm80 = {};
};

// Which gradients of a fold with a payload are computed.
struct GradientSet {
  bool rows = true, columns = true, payload = true;
  bool of_columns() const { return columns || payload; }
};

// How the blocks of attention's backward pass share its jobs (work tiles).
struct JobSharing {
  // The size of 16-byte aligned scratch: the fix-up of split jobs, then an atomic counter of jobs if they differ in length. The
  // last `words` words must be 0 at first.
  std::int64_t floats = 0, words = 0;
  // Equally long jobs: the number of those in the stream-K tail, each split over several blocks.
  int split_jobs = 0;
  // Jobs that differ in length: how each is split.
  PartsOfJob parts = {};
  // Deterministic mode: semaphores make blocks add to the rows' gradients in a fixed order (semaphores.cuh; the scratch of the
  // semaphores is not counted here).
  bool in_turn = false;
};

// The problem that a plan was made for. Using it for a call on other sizes is an error.
struct PlannedSizes {
  std::int64_t batch, heads, column_heads, rows, columns, width, other_width, payload_width;
  DType dtype;
  int device;           // -1: planned for a GPU that is not present
  bool biased, banded;  // whether there is a bias; whether a window or listed spans mask elements
  bool operator==(const PlannedSizes&) const = default;
};

// How a user's program on narrow operands is split (StatisticsRowGradient). A few lanes of a warp hold the gradient of a row in
// registers. In SIMT kernels they hold the row too; in kernels for planes the row is in shared memory.
struct OwnedRows {
  int lanes;                // the number of lanes that share the width of a row
  std::int64_t splits = 1;  // the number of parts of the columns, which different blocks fold
};

// The tile of a backward pass that passes over the scores for each gradient: the lines that stay on chip (rows for the rows' gradient,
// otherwise columns), and the lines that stream past them.
struct StreamedTile {
  std::int64_t staying, streamed;
};

// The dlogits that a loss's forward pass saves.
struct SavedDlogits {
  std::int64_t columns = 0;  // those of so many of the first columns
  // The offset in the scratch of the row maxima ("frames") that saved softmax weights are measured from.
  std::int64_t frames = 0;
};

// Sizes of operands before padding. other_width: of the second operand or of the payload. columns: in an MLP the hidden units.
struct UnpaddedSizes {
  std::int64_t width = 0, other_width = 0, columns = 0;
};

// All that planning decides, which the calls only read. A member that is set for some operators alone says which.
struct Plan {
  const char* call = "";    // name of the call (Description::name)
  PlannedSizes sizes = {};  // on tensor cores, those of the padded operands
  Choice choice = {};
  bool deterministic = false, tf32 = false;
  std::int64_t scratch = 0;  // elements of the accumulation type that the call needs
  UnpaddedSizes unpadded = {};
  // The rows and columns of scores, or rows and hidden units, that a block or a cluster computes at a time. Absent: the planner
  // does not say.
  std::optional<TileSize> tile = {};

  // Attention and the MLP with few rows on tensor cores: the packing (split-KV, PackGQA). The losses, log-sum-exp and folds of
  // programs by SIMT kernels: how columns are split, if they are.
  std::optional<Packing> packing = {};
  // Attention's and the MLP's backward pass. adds_rows: whether kernels add to d_q or d_x, in the accumulation type. false: they
  // write it, in the inputs' type. streamed_tile: on Hopper, if each gradient has a pass of its own (wider than 128, or in
  // planes).
  bool adds_rows = true;
  std::optional<StreamedTile> streamed_tile = {};
  // Attention's backward pass on tensor cores: the gradients that the kernels write, even if fewer are wanted.
  GradientSet computed = {};
  JobSharing sharing = {};

  // An MLP that no kernel takes whole, and why. If tensor cores take it in parts: the rows and hidden units of a part
  // (MlpHidden).
  std::optional<Choice> whole = {};
  std::optional<TileSize> part = {};

  // Losses. saved: in forward. clusters: in backward, the number of 2-CTA clusters that multiply the dlogits; 0: torch does.
  SavedDlogits saved = {};
  int clusters = 0;
  // logsumexp_matmul with narrow operands, for which threads have registers for more of a row: forward also saves the weighted
  // mean of b, and gradients are folds too, not products of dlogits (LogSumExpBackward).
  bool narrow = false;

  // A user's program. payload_slabs: how many slabs of a payload one kernel adds up while it folds (StatisticsPayload), as far as
  // registers allow; 0 if the rows are too wide for that.
  std::optional<OwnedRows> owned_rows = {};
  std::int64_t payload_slabs = 0;

  const Capabilities& can() const { return kFamilies[static_cast<int>(choice.family)]; }
  // Losses: whether the caller gives kernels an order of the active rows. Rows of a single tile have none: the tile is computed
  // whole, so that skipping rows would save no time. Kernels then read the rows in place.
  bool skips_rows() const { return can().skips_rows && tile && sizes.rows > tile->rows; }
};

// The plan in words, for mr.explain.
std::string text(const Plan& plan);

}  // namespace monoidreduce
