// Monoids with a user's score_mod and mask_mod (folds/program/mods.py), which the interpreter runs. The program has four
// panels: the dot product, which becomes the score; the mask, 0 or -inf; in backward the derivative of the score with
// respect to the dot product; and with dropout the factor of the weight (kFactors).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "monoidreduce/cpu/panels.h"
#include "monoidreduce/cpu/program.h"
#include "monoidreduce/monoids/sum.h"

namespace monoidreduce::cpu {
inline namespace MR_CPU_ISA {

inline constexpr int kFactors = 3;  // the panel of the factors of weights

// A block mask: [batch, heads, blocks of rows, blocks of columns] int64, 0 for a block that is entirely masked.
struct CpuBlockMask {
  const TensorView* map;  // absent: no block is masked
  std::int64_t rows, columns;

  // Whether any of these rows and columns are in a block that is not entirely masked.
  bool touch(const ProblemRows& of, std::int64_t first, std::int64_t count, std::int64_t column,
             std::int64_t column_count) const {
    if (!map->present()) return true;
    const auto* const kinds = static_cast<const std::int64_t*>(map->data);
    for (std::int64_t row = first; row < first + count;) {
      const std::int64_t position = of.position(row), block = position / rows;
      const std::int64_t* const line =
          kinds + of.batch * map->stride[0] + of.head(row) * map->stride[1] + block * map->stride[2];
      for (std::int64_t j = column / columns; j * columns < column + column_count; ++j)
        if (line[j * map->stride[3]] != 0) return true;
      row += std::min((block + 1) * rows, of.per_head) - position;
    }
    return false;
  }
};

template <class T>
struct ModifiedScores {
  static constexpr bool kModifiesScores = true;
  const Program<T>* program;
  CpuBlockMask blocks;
  double scale;
  bool has_factors = program->writes(kFactors);

  bool touches(const ProblemRows& of, std::int64_t first, std::int64_t count, std::int64_t column,
               std::int64_t columns) const {
    return blocks.touch(of, first, count, column, columns);
  }
  // Turns dot products into scores, for a tile of columns and the panel that begins with row `first` of a problem.
  void modify(const ProblemRows& of, std::int64_t first, std::int64_t column, std::int64_t columns,
              const std::array<T*, kPanels>& panels) const {
    Interpreter<T> interpreter(*program);
    interpreter.begin(of.flat(first));
    interpreter.run_tile(panels, column, columns, static_cast<T>(scale));
  }
};

template <class R>
struct ModifiedLogSumExp : LogSumExp<R>, ModifiedScores<Scalar<R>> {};
// The program returns weights instead of scores (attention without softmax).
template <class R>
struct ModifiedSum : Sum<R>, ModifiedScores<Scalar<R>> {};

}  // namespace MR_CPU_ISA
}  // namespace monoidreduce::cpu
