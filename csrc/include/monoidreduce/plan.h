// How a call runs on a GPU, as plain data. A plan is made once, by plan() in operators.h, before the caller allocates anything.
// Then it is passed to the call.
#pragma once

#include <cstdint>
#include <string>

#include "monoidreduce/device/schedule/packing.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce {

// The families of kernels: ordinary (SIMT) kernels, which take every call; mma.sync kernels for tensor cores from compute
// capability 8.0 on; wgmma and TMA kernels for Hopper.
enum class Family : std::int8_t { kSimt, kSm80, kSm90 };

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
  bool keeps = false;         // forward can save dlogits for backward
  bool skips_rows = false;    // skips rows that are not active, given their order
  bool transposed = false;    // reads a transposed weight of a loss in place
  // Loads score biases in tiles by TMA: their rows must be dense and on 16-byte boundaries.
  bool bias_in_tiles = false;
  bool clusters = false;  // a contraction tile is shared by a 2-CTA cluster
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
  // The size of 16-byte aligned scratch; its last `words` words must be 0 at first. If in_parts is 0, the scratch is an atomic
  // counter of jobs.
  std::int64_t floats = 0, words = 0;
  int in_parts = 0;  // the number of jobs in the stream-K tail, each split over several blocks
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

struct Plan {
  const char* call = "";    // name of the call (Description::name)
  PlannedSizes sizes = {};  // on tensor cores, those of the padded operands
  Choice choice = {};
  bool deterministic = false, tf32 = false;
  std::int64_t scratch = 0;  // elements of the accumulation type that the call needs
  // Whether kernels add to d_q or d_x, in the accumulation type. false: they write it, in the inputs' type.
  bool adds_rows = true;
  // Attention's backward pass on tensor cores: the gradients that the kernels write, even if fewer are wanted.
  GradientSet computed = {};
  // Narrow operands, for which threads have registers for more of a row. logsumexp_matmul: forward also saves the weighted mean
  // of b, and gradients are folds too, not products of dlogits (LogSumExpBackward). A user's program without tensor cores: each
  // thread owns rows (StatisticsRowGradient).
  bool narrow = false;
  // For a narrow program: the number of parts of the columns, which different blocks fold; and the number of lanes that share
  // the width of a row.
  std::int64_t parts = 1;
  int lanes = 0;
  // The rows and columns of scores that a block or a cluster computes at a time, on Hopper. In a backward pass wider than 128,
  // in which each gradient has its own kernel: the lines that stay on chip and the lines that stream past them. For an MLP
  // in parts, rows and hidden units. 0: the planner does not say.
  TileSize tile = {};
  // Attention and the MLP with few rows: the packing (split-KV, PackGQA). packing.heads is 0 if there are many rows.
  Packing packing = {};
  JobSharing sharing = {};
  // An MLP that runs in parts: the rows and hidden units of a part (MlpHidden), and why no kernel takes it whole.
  TileSize part = {};
  Choice whole = {};
  // The number of 2-CTA clusters that multiply the dlogits of a backward pass. 0: torch multiplies them.
  int clusters = 0;
  // A loss's forward pass that saves dlogits: for how many of the first columns. frames: the offset in the scratch of the row
  // maxima ("frames") that the saved weights are measured from.
  std::int64_t kept = 0, frames = 0;
  // Sizes before padding: the width, the width of the second operand or of the payload, the hidden units (columns).
  std::int64_t given[3] = {};

  const Capabilities& can() const { return kFamilies[static_cast<int>(choice.family)]; }
  // Turns a plan for a loss's forward pass into one that saves the dlogits of the first `columns` columns.
  void keep(std::int64_t columns);
};

// The plan in words, for mr.explain.
std::string text(const Plan& plan);

}  // namespace monoidreduce
