// The layout of the scratch memory of an MLP in float32 whose kernels read planes of float16.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/ops/mlp.h"
#include "monoidreduce/ops/planes.h"

namespace monoidreduce {

// First come marks of results that are not finite (repair.cuh). The forward pass has a mark for each row, the backward pass one
// for every 64 rows and one for every 64 hidden units. Behind them, on a 16-byte boundary, are the planes of x, w1, w2 and, in
// the backward pass, grad_out.
struct MlpPlanesParts {
  static constexpr int kUnit = 64;
  std::int64_t row_marks, column_marks, marks, planes;  // marks, planes: sizes of the two parts, in floats

  explicit MlpPlanesParts(const MlpForward& x)
      : MlpPlanesParts(x.x.size[0], 0, mlp_problem(x), x.x.size[0] + 2 * x.w1.size[0]) {}
  explicit MlpPlanesParts(const MlpBackward& x)
      : MlpPlanesParts(units(x.x.size[0]), units(x.w1.size[0]), mlp_problem(x),
                       2 * (x.x.size[0] + x.w1.size[0])) {}

 private:
  static std::int64_t units(std::int64_t lines) { return (lines + kUnit - 1) / kUnit; }
  // lines: of all operands
  MlpPlanesParts(std::int64_t row_marks, std::int64_t column_marks, const FoldProblem& p, std::int64_t lines)
      : row_marks(row_marks),
        column_marks(column_marks),
        marks((row_marks + column_marks + 3) / 4 * 4),
        planes(lines * planes_width(std::max(p.width(), p.payload_width())) / 2) {}
};

}  // namespace monoidreduce
