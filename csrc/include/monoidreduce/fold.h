// A fold problem as plain data: the input of the CPU engine (cpu/fold.h) and of the GPU kernels (device/). Nothing here owns
// memory.
//
//   X_ij  = score(<a_i, b_j>, bias_ij)         for the columns j in range of row i
//   P_i   = fold_j lift(X_ij)
//   out_i = sum_j weight_ij payload_j          with a payload; divided by the mass where the monoid is normalized
//
// Rows are [batch, heads, rows], columns [batch, column heads, columns]. Several query heads may share one column
// head (grouped-query attention): heads / column heads of them. Row statistics and accumulation are float, or
// double for float64 tensors.
#pragma once

#include <cstdint>

#include "monoidreduce/score.h"
#include "monoidreduce/tensor_view.h"

namespace monoidreduce {

// A float32 operand as two float16 planes (device/contraction/split_planes.cuh).
struct OperandPlanes {
  TensorView halves = {};  // [lines, 2 * plane or more]: the high plane, then the low one
  std::int64_t plane = 0;
  // The scales of lines, or null if products are not multiplied by them; and floats between two of them.
  const float* scales = nullptr;
  std::int64_t scale_pitch = 0, scale_lines = 0;
};

struct FoldProblem {
  TensorView a;                                // [B, H, M, F]
  TensorView b;                                // [B, Hc, N, F]
  OperandPlanes a_planes = {}, b_planes = {};  // where kernels read planes instead of a and b
  // [B, H, M, E] [B, Hc, N, E]: operands of the second score; absent unless the monoid has two scores.
  TensorView other_a = {}, other_b = {};
  OperandPlanes other_a_planes = {}, other_b_planes = {};
  TensorView payload = {};  // [B, Hc, N, D]  or absent
  // [B, H, M, N], stride 0 where broadcast; floating, or bool (false excludes an element); or absent.
  TensorView bias = {};
  TensorView out_bias = {};  // [D]            added to the payload's fold; or absent
  ScoreOptions score = {};
  ColumnRange range = {};
  bool whole = true;  // backward: whether the columns are all that P_i was folded over, or a slice of them
  // [M + 1] int64, or absent; only with one batch and one head. The indices of the active rows, then of the others, and
  // last the number of active rows.
  TensorView order = {};
  // A problem may hold only part of the ordered rows, the places from first_place on. places is then the number of all
  // rows. 0 means that the problem holds them all.
  std::int64_t first_place = 0, places = 0;

  std::int64_t batch() const { return a.size[0]; }
  std::int64_t heads() const { return a.size[1]; }
  std::int64_t column_heads() const { return b.size[1]; }
  std::int64_t rows() const { return a.size[2]; }
  std::int64_t all_rows() const { return places == 0 ? rows() : places; }
  std::int64_t columns() const { return b.size[2]; }
  std::int64_t width() const { return a.size[3]; }
  std::int64_t other_width() const { return other_a.present() ? other_a.size[3] : 0; }
  std::int64_t payload_width() const { return payload.present() ? payload.size[3] : 0; }
};

// Where the payload's fold is written.
struct FoldOutput {
  TensorView out;       // [B, H, M, D]   of any element type
  TensorView low = {};  // [B, H, M, D]   the error of rounding to 16-bit out, in out's dtype; or absent
};

// The gradients of a fold. A gradient whose tensor is absent is not computed.
// d_bias is added to, in the accumulation type, on the CPU and on GPUs. The CPU engine writes all other gradients, in the
// tensor's own type. GPU kernels add to them in the accumulation type.
struct FoldGradients {
  TensorView grad_out;   // [B, H, M, D]   upstream gradient of out; absent where there is no payload
  TensorView d_a;        // [B, H, M, F]
  TensorView d_b;        // [B, Hc, N, F]
  TensorView d_other_a;  // [B, H, M, E]
  TensorView d_other_b;  // [B, Hc, N, E]
  TensorView d_payload;  // [B, Hc, N, D]
  TensorView d_bias;     // [B, H, M, N]   stride 0 where the bias was broadcast
};

// The size of a tile of scores that an engine computes at a time.
struct TileSize {
  std::int64_t rows, columns;
};

}  // namespace monoidreduce
