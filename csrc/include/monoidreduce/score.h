// Score policies: how a dot product becomes the score that a monoid sees. They work with every monoid.
//   attention      softcap(scale * dot) + bias, for the keys that neither the column range nor a bool bias masks
//   cross entropy  softcap(scale * dot + bias)
//   MLP            dot + bias
#pragma once

#include "monoidreduce/math.h"

namespace monoidreduce {

struct ScoreOptions {
  double scale = 1;
  double softcap = 0;        // c: score -> c tanh(score / c); 0 for none
  bool bias_inside = false;  // the bias is added before the softcap
};

template <class R>
struct Score {
  Scalar<R> scale, softcap, inverse_softcap;
  bool bias_inside;

  MR_HD explicit Score(ScoreOptions o)
      : scale(Scalar<R>(o.scale)),
        softcap(Scalar<R>(o.softcap)),
        inverse_softcap(Scalar<R>(o.softcap == 0 ? 0 : 1 / o.softcap)),
        bias_inside(o.bias_inside) {}

  MR_HD R value(R dot, R bias) const {
    if (softcap == 0) return multiply_add(dot, R(scale), bias);
    if (bias_inside)
      return multiply_add(R(softcap), tanh(multiply_add(dot, R(scale), bias) * inverse_softcap), R(0));
    return multiply_add(R(softcap), tanh(dot * scale * inverse_softcap), bias);
  }
  // The derivative of the score with respect to the argument of the softcap, and so with respect to a bias inside it.
  // Multiplied by scale, it is the derivative with respect to the dot product.
  MR_HD R slope(R dot, R bias) const {
    if (softcap == 0) return R(1);
    const R t = tanh((bias_inside ? dot * scale + bias : dot * scale) * inverse_softcap);
    return R(1) - t * t;
  }
};

// The unmasked columns of a row, or the unmasked rows of a column.
struct Span {
  std::int64_t begin, end;  // end: one past the last
};

// The unmasked columns of each row. Either a band (causal or sliding window): column - (row + shift) in [-left, right],
// where shift aligns the last row with the last column. Or, if listed, a span for each row and each column, in memory on
// the tensors' device (packed sequences). From one row or column to the next, neither begin nor end decreases.
struct ColumnRange {
  static constexpr std::int64_t kUnbounded = -1;
  std::int64_t left = kUnbounded, right = kUnbounded, shift = 0;
  bool listed = false;
  const Span *of_rows = nullptr, *of_columns = nullptr;  // if listed; null while the call is planned

  MR_HD bool all() const { return left == kUnbounded && right == kUnbounded && !listed; }
  MR_HD std::int64_t begin(std::int64_t row) const {
    if (listed) return of_rows[row].begin;
    const std::int64_t first = row + shift - left;
    return left == kUnbounded || first < 0 ? 0 : first;
  }
  // One past the last column, at most columns and at least 0.
  MR_HD std::int64_t end(std::int64_t row, std::int64_t columns) const {
    if (listed) return of_rows[row].end;
    if (right == kUnbounded) return columns;
    const std::int64_t last = row + shift + right + 1;
    return last < 0 ? 0 : last < columns ? last : columns;
  }
  // The same band, less the bounds that mask no column of these rows. A single causal query, say, has no bound.
  ColumnRange bounding(std::int64_t rows, std::int64_t columns) const {
    return {rows == 0 || begin(rows - 1) == 0 ? kUnbounded : left,
            end(0, columns) == columns ? kUnbounded : right, shift};
  }
};

}  // namespace monoidreduce
