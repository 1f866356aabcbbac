// How a call runs on a GPU, as plain data. It is made once, before the caller allocates (operators.h: plan), and handed to the
// call.
#pragma once

#include <cstdint>
#include <string>

#include "monoidreduce/device/schedule/packing.h"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/launch.h"

namespace monoidreduce {

// The families of kernels: for everything, for tensor cores, and for Hopper.
enum class Family : std::int8_t { kSimt, kSm80, kSm90 };

// A row of the table of families: which GPUs and calls each is for, and what a caller may ask of it.
struct Capabilities {
  const char* name;
  int major = 0;               // the least compute capability,
  bool major_alone = false;    // or the only one
  std::int64_t widest = 0;     // rows of attention and the MLP, which stay in shared memory; 0: any
  bool tf32 = false;           // float32 operands of attention and the MLP, rounded
  bool tensor_cores = false;   // operands have sizes in multiples of 8, and lines of adjacent elements
  bool multiplies = false;     // local gradients, by rows_product and columns_product
  bool keeps = false;          // local gradients, in a forward pass
  bool skips_rows = false;     // that are not active, given an order of them
  bool transposed = false;     // weights of losses, as they lie
  bool bias_in_tiles = false;  // of scores, whose rows are dense and on 16-byte boundaries
  bool clusters = false;       // of two multiprocessors share a tile of a contraction
  // Kernels of modified scores are compiled for packed sequences, and for an order of sums; and may add to dot products in place
  // of scores.
  bool modified_cases = false;
  const char* architecture = nullptr;  // that kernels of programs are compiled for; null: the GPU's own
};
inline constexpr Capabilities kFamilies[] = {
    {.name = "simt"},
    {.name = "sm80", .major = 8, .widest = 256, .tf32 = true, .tensor_cores = true},
    {.name = "sm90",
     .major = 9,
     .major_alone = true,
     .widest = 256,
     .tensor_cores = true,
     .multiplies = true,
     .keeps = true,
     .skips_rows = true,
     .transposed = true,
     .bias_in_tiles = true,
     .clusters = true,
     .modified_cases = true,
     .architecture = "sm_90a"},
};

// Why a call does not run on a family of kernels: a text, with the next of the numbers at each "{}".
struct Reason {
  const char* text = nullptr;
  double numbers[3] = {};
  constexpr Reason() = default;
  template <class... Number>
  constexpr Reason(const char* text, Number... number)
      : text(text), numbers{static_cast<double>(number)...} {}
  explicit operator bool() const { return text != nullptr; }
};

// The fastest family that takes a call. both: what keeps it from tensor cores; or sm90 and sm80, from each.
struct Choice {
  Family family = Family::kSimt;
  Reason both = {}, sm90 = {}, sm80 = {};
};

// The gradients of a fold with a payload.
struct GradientSet {
  bool rows = true, columns = true, payload = true;
  bool of_columns() const { return columns || payload; }
};

// How the blocks of attention's backward pass share its jobs.
struct JobSharing {
  // 16-byte aligned scratch; its last `words` words must be 0 at first. If in_parts is 0, it is a counter of jobs.
  std::int64_t floats = 0, words = 0;
  int in_parts = 0;  // the number of jobs that are split over several blocks
  // Blocks add to the rows' gradients in a fixed order (turns.cuh, whose scratch is not counted here).
  bool in_turn = false;
};

// What a plan is of: a call on other sizes needs another.
struct PlannedSizes {
  std::int64_t batch, heads, column_heads, rows, columns, width, other_width, payload_width;
  DType dtype;
  int device;           // -1: none that is there
  bool biased, banded;  // is there a bias, does a window exclude elements
  bool operator==(const PlannedSizes&) const = default;
};

struct Plan {
  const char* call = "";    // its name
  PlannedSizes sizes = {};  // on tensor cores, of padded operands
  Choice choice = {};
  bool deterministic = false, tf32 = false;
  std::int64_t scratch = 0;   // elements of the accumulation type that the call needs
  bool adds_rows = true;      // d_q, d_x: added to; false: written in the inputs' type
  GradientSet computed = {};  // attention's backward pass on tensor cores: what is written, wanted or not
  // logsumexp_matmul: forward keeps the mean of b, and gradients are folds (LogSumExpBackward). A program without tensor cores:
  // threads own rows (StatisticsRowGradient).
  bool narrow = false;
  // A narrow program's: parts of the columns, which different blocks fold; and lanes that share a row's width.
  std::int64_t parts = 1;
  int lanes = 0;
  // What a block, or a cluster, computes at a time, on Hopper: rows and columns of scores. Backward above a width of 128, where each
  // gradient has a pass: lines that stay and lines that stream. Hidden values where an MLP comes in parts. 0: not told.
  TileSize tile = {};
  // Attention and the MLP, few rows: how they are packed; no heads: they are many.
  Packing packing = {};
  JobSharing sharing = {};
  // An MLP in parts: the rows and hidden units of one (MlpHidden), and why no kernel takes it whole.
  TileSize part = {};
  Choice whole = {};
  int clusters =
      0;  // of two multiprocessors, that multiply the local gradients of a backward pass; 0: torch does
  // A forward pass that keeps local gradients: of the first columns. frames: where theirs begin in the scratch.
  std::int64_t kept = 0, frames = 0;
  std::int64_t given[3] =
      {};  // width, that of the other operand or the payload, and hidden units; before padding

  const Capabilities& can() const { return kFamilies[static_cast<int>(choice.family)]; }
  // Makes this the plan of a forward pass of a loss that keeps local gradients of so many columns.
  void keep(std::int64_t columns);
};

// In words, for people.
std::string text(const Plan& plan);

}  // namespace monoidreduce
