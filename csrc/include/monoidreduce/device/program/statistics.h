// The fold of a user's program: the statistics of a row's elements (monoidreduce.stat). The program is a
// generated type P (monoidreduce/folds/cuda/cuda_source.py):
//
//   Real                                                float or double; on tensor cores ElementReal, or for
//                                                       gradients GradientReal
//   kScores                                             scores of an element, 1 or 2
//   kRowData, kRowIndices, kColumnData, kColumnIndices  how many numbers it reads of a row and of a column
//   RowIndex, ColumnIndex                               types of these integers: std::int64_t, or Index<Real>, in which
//                                                       an integer that does not fit becomes the nearest one
//   kMeans[s], kSoftmaxes, kTotals, kLargest, kCounts   how many statistics it has; means for each softmax
//   kCarried                                            how many of the largest, from the first on, carry another value of
//                                                       their column
//   kEntropies, kEntropyOf[e]                           how many entropies, and the softmax of each
//   kLines                                              lines of code for an element
//   kWeights                                            weights of vectors that the kernel computes, for payload sums
//   statistics(element)                                 -> ElementStatistics<P>
//
// With payload sums (resident/fold_payload_sm90.cuh) it also has
//
//   kVectors                      vectors that a column has for each sum; weights are ordered by sums, then by vectors
//   kSoftmaxOf[k], kCountOf[k]    of each sum the softmax, -1 for a total; and the count of vectors that are not finite, -1 if
//                                 there is none
//   kBounded, bound(element, first, end)    whether a row's columns have bounds; raises first and lowers end to them
//
// For gradients it has instead gradient(element) -> Gradient<Real>; or, in kernels whose threads own rows
// (simt/program_narrow.cuh), kOperands, kSums and pulled(element) -> ElementGradients<P>.
#pragma once

#include <cstdint>

#include "monoidreduce/device/program/functions.h"
#include "monoidreduce/monoids/entropy.h"

namespace monoidreduce {

// An array that may be empty, which C++ does not have.
template <class T, int kCount>
struct Numbers {
  T at[kCount > 0 ? kCount : 1];
  MR_HD T& operator[](int i) { return at[i]; }
  MR_HD const T& operator[](int i) const { return at[i]; }
};

// Tables that a program gathers from: reals of the accumulation type, and integers. An index outside a table
// reads its first or last number.
struct ProgramTables {
  const void* real = nullptr;
  const std::int64_t* integer = nullptr;
  std::int64_t reals = 0, integers = 0;

  template <class R>
  MR_HD R gather(Index<R> i) const {
    return R(static_cast<const Scalar<R>*>(real)[there(i, reals)]);
  }
  // X: a type of the integer's low half if it fits there, or of all of it.
  template <class X, class I>
  MR_HD X index_gather(I i) const {
    return static_cast<X>(integer[there(i, integers)]);
  }
  // The entry that gather(i) reads.
  template <class I>
  MR_HD I entry(I i) const {
    return there(i, reals);
  }

 private:
  // The index clamped to the table, in its own type: 64 bits would take twice the registers.
  template <class I>
  MR_HD static I there(I i, std::int64_t count) {
    const I last = saturated<I>(count - 1);
    return i < 0 ? I(0) : i < last ? i : last;
  }
};

template <class P>
struct ProgramRow {
  Numbers<typename P::Real, P::kRowData> data;
  Numbers<typename P::RowIndex, P::kRowIndices> index;
};
template <class P>
struct ProgramElement {
  using R = typename P::Real;
  R score, other;
  Index<R> position;  // the index of the column
  ProgramRow<P> row;
  Numbers<R, P::kColumnData> column;
  Numbers<typename P::ColumnIndex, P::kColumnIndices> column_index;
  const ProgramTables& tables;
};

template <class P>
constexpr int means() {
  int count = 0;
  for (int s = 0; s < P::kSoftmaxes; ++s) count += P::kMeans[s];
  return count;
}
template <class P>
struct ElementStatistics {
  using R = typename P::Real;
  Numbers<R, P::kSoftmaxes> log_weight;
  Numbers<R, means<P>()> mean;  // the values whose means are taken, for all softmaxes
  Numbers<R, P::kTotals> total;
  Numbers<R, P::kLargest> largest;
  Numbers<R, P::kCarried> carried;
  Numbers<bool, P::kCounts> counted;
  Numbers<R, P::kWeights> factor;  // of each vector of the column; a softmax's weight is another factor

  // Weight g, measured from the frame of its sum's softmax. weight: of the element in each softmax.
  MR_HD R payload_weight(int g, const Numbers<R, P::kSoftmaxes>& weight) const {
    const int s = P::kSoftmaxOf[g / P::kVectors];
    if (s < 0) return factor[g];
    return select(log_weight[s] == -infinity<R>(), R(0), weight[s] * factor[g]);
  }
};

// Gradients with respect to the scores, and to kSums numbers of the row's data.
template <class P>
struct ElementGradients {
  using R = typename P::Real;
  R score, other;
  Numbers<R, P::kSums> sums;
};

// Whether x is larger than y. NaN is the largest.
template <class R>
MR_HD bool is_larger(R x, R y) {
  return !(x <= y) && y == y;
}
// The same for x in column j and y in column k: of equal values that in the first column is larger.
template <class R>
MR_HD bool is_larger(R x, Index<R> j, R y, Index<R> k) {
  return is_larger(x, y) || (j < k && !is_larger(y, x));
}

// Another frame of each softmax: by what its weights are multiplied there, and by how much it is higher.
template <class P>
struct FrameMove {
  Numbers<typename P::Real, P::kSoftmaxes> factor, rise;
};

template <class P>
struct StatisticsSums {
  using R = typename P::Real;
  static constexpr int kMeans = means<P>(), kMeansAndEntropies = kMeans + P::kEntropies;
  Numbers<R, P::kSoftmaxes> mass;
  Numbers<R, kMeansAndEntropies> mean;  // sums of weights times values, then those of entropies
  Numbers<R, P::kTotals> total;

  MR_HD static StatisticsSums none() {
    StatisticsSums x{};
    MR_UNROLL for (int k = 0; k < P::kTotals; ++k) x.total[k] = R(-0.f);
    return x;
  }
  MR_HD void add(const StatisticsSums& x) {
    MR_UNROLL for (int s = 0; s < P::kSoftmaxes; ++s) mass[s] = mass[s] + x.mass[s];
    MR_UNROLL for (int k = 0; k < kMeansAndEntropies; ++k) mean[k] = mean[k] + x.mean[k];
    MR_UNROLL for (int k = 0; k < P::kTotals; ++k) total[k] = total[k] + x.total[k];
  }
  // The same, and adds the rounding errors of float32 to `low`.
  MR_HD void add(const StatisticsSums& x, StatisticsSums& low) {
    const auto add = [](R& to, R& low, R y) {
      if constexpr (std::is_same_v<R, double>) {
        to = to + y;
      } else {
        const LogNumber<R> sum = two_sum(to, y);
        to = sum.high, low = low + sum.low;
      }
    };
    MR_UNROLL for (int s = 0; s < P::kSoftmaxes; ++s) add(mass[s], low.mass[s], x.mass[s]);
    MR_UNROLL for (int k = 0; k < kMeansAndEntropies; ++k) add(mean[k], low.mean[k], x.mean[k]);
    MR_UNROLL for (int k = 0; k < P::kTotals; ++k) add(total[k], low.total[k], x.total[k]);
  }
  // Measures from other frames what is relative to them.
  MR_HD void move(const FrameMove<P>& to) {
    int k = 0;
    MR_UNROLL for (int s = 0; s < P::kSoftmaxes; ++s) {
      mass[s] = mass[s] * to.factor[s];
      MR_UNROLL for (int end = k + P::kMeans[s]; k < end; ++k) mean[k] = mean[k] * to.factor[s];
    }
    MR_UNROLL for (int e = 0; e < P::kEntropies; ++e) {
      const int s = P::kEntropyOf[e];
      const R moved = Entropy<R>::moved(mean[kMeans + e], to.factor[s], mass[s], to.rise[s]);
      mean[kMeans + e] = select(to.factor[s] == R(0), R(0), moved);
    }
  }
};

// The statistics of some elements of a row. Weights are measured from a frame, the largest log weight (a
// running row max). If that is +inf, the frame is the largest finite number, as in LogSumExp.
template <class P>
struct StatisticsState {
  using R = typename P::Real;
  using I = Index<R>;
  static constexpr I kNoColumn = std::numeric_limits<I>::max();
  Numbers<R, P::kSoftmaxes> frame;
  StatisticsSums<P> sums;
  Numbers<R, P::kLargest> largest;
  Numbers<R, P::kCarried> carried;
  Numbers<I, P::kLargest> at;
  Numbers<I, P::kCounts> count;

  MR_HD static R origin(R frame) { return LogSumExp<R>::origin(frame); }

  // Measures weights from new frames.
  MR_HD FrameMove<P> raise(const Numbers<R, P::kSoftmaxes>& top) {
    FrameMove<P> move{};
    MR_UNROLL for (int s = 0; s < P::kSoftmaxes; ++s) {
      const R to = select(top[s] == infinity<R>(), monoidreduce::largest<R>(), top[s]);
      move.factor[s] = weight_of(frame[s] - origin(to)), move.rise[s] = raised(frame[s], to), frame[s] = to;
    }
    sums.move(move);
    return move;
  }
  // Adds an element to the sums `part`. Returns its weight in each softmax. Elements come in the order of their columns. The
  // frames must already have taken its log weights into account, so that no exponential overflows.
  MR_HD Numbers<R, P::kSoftmaxes> add(const ElementStatistics<P>& e, I column, bool present,
                                      StatisticsSums<P>& part) {
    Numbers<R, P::kSoftmaxes> weight{};
    int k = 0;
    MR_UNROLL for (int s = 0; s < P::kSoftmaxes; ++s) {
      const R log_weight = present ? e.log_weight[s] : -infinity<R>();
      weight[s] = weight_of(log_weight - origin(frame[s]));
      part.mass[s] = part.mass[s] + weight[s];
      MR_UNROLL for (int end = k + P::kMeans[s]; k < end; ++k) part.mean[k] =
          part.mean[k] + select(log_weight == -infinity<R>(), R(0), weight[s] * e.mean[k]);
      MR_UNROLL for (int n = 0; n < P::kEntropies; ++n) {
        if (P::kEntropyOf[n] != s) continue;
        R& sum = part.mean[StatisticsSums<P>::kMeans + n];
        sum = sum + weight[s] * Entropy<R>::finite(log_weight - origin(frame[s]));
      }
    }
    MR_UNROLL for (int k = 0; k < P::kTotals; ++k) part.total[k] =
        part.total[k] + select(present, e.total[k], R(-0.f));
    MR_UNROLL for (int k = 0; k < P::kLargest; ++k) {
      const bool take = present && is_larger(e.largest[k], largest[k]);
      largest[k] = select(take, e.largest[k], largest[k]), at[k] = select(take, column, at[k]);
      if (k < P::kCarried) carried[k] = select(take, e.carried[k], carried[k]);
    }
    MR_UNROLL for (int k = 0; k < P::kCounts; ++k) count[k] += present && e.counted[k];
    return weight;
  }
};

// Combines the states of parts of a row.
template <class P>
struct StatisticsSum {
  using State = StatisticsState<P>;
  using R = typename P::Real;

  MR_HD State identity() const {
    State s{};
    s.sums = StatisticsSums<P>::none();
    MR_UNROLL for (int k = 0; k < P::kSoftmaxes; ++k) s.frame[k] = -infinity<R>();
    MR_UNROLL for (int k = 0; k < P::kLargest; ++k) s.largest[k] = -infinity<R>(), s.at[k] = State::kNoColumn;
    MR_UNROLL for (int k = 0; k < P::kCarried; ++k) s.carried[k] = -infinity<R>();
    return s;
  }
  MR_HD State combine(State a, const State& b) const {
    StatisticsSums<P> unused{};
    add(a, unused, b);
    return a;
  }
  // a = combine(a, b), and the rounding errors of the sums are added to `low`, which is relative to a's frames. For a row of many
  // parts: added up in one word, those of 100,000 columns had lost 17 times as much as torch.sum loses.
  MR_HD void add(State& a, StatisticsSums<P>& low, State b) const {
    Numbers<R, P::kSoftmaxes> top;
    MR_UNROLL for (int s = 0; s < P::kSoftmaxes; ++s) top[s] = LogSumExp<R>{}.join(a.frame[s], b.frame[s]);
    low.move(a.raise(top)), b.raise(top);
    a.sums.add(b.sums, low);
    MR_UNROLL for (int k = 0; k < P::kLargest; ++k) {
      const bool take = is_larger(b.largest[k], b.at[k], a.largest[k], a.at[k]);
      a.largest[k] = select(take, b.largest[k], a.largest[k]), a.at[k] = select(take, b.at[k], a.at[k]);
      if (k < P::kCarried) a.carried[k] = select(take, b.carried[k], a.carried[k]);
    }
    MR_UNROLL for (int k = 0; k < P::kCounts; ++k) a.count[k] += b.count[k];
  }
};

// The largest log weights of each row, of kCount elements and of top before. Element i belongs to row row_of(i). kAll: all of
// them are present.
template <class P, int kCount, bool kAll, int kStates, class RowOf, class ElementAt, class Present>
MR_HD void find_tops(Numbers<typename P::Real, P::kSoftmaxes> (&top)[kStates], const RowOf& row_of,
                     const ElementAt& element, const Present& present) {
  MR_UNROLL for (int i = 0; i < kCount; ++i) {
    const ElementStatistics<P> e = P::statistics(element(i));
    auto& of_row = top[row_of(i)];
    MR_UNROLL for (int s = 0; s < P::kSoftmaxes; ++s) of_row[s] =
        kAll || present(i) ? max(e.log_weight[s], of_row[s]) : of_row[s];
  }
}
// Adds kCount elements to the states of their rows. raise() must have been called with their log weights, so that no exponential
// overflows. The elements' sums are formed first and then added to the states, so that errors grow with the number of elements of a
// part plus the number of parts, not with their product. added(i, statistics, weights): called for each element.
template <class P, int kCount, bool kAll, int kStates, class RowOf, class ElementAt, class Present,
          class Added>
MR_HD void add_elements(StatisticsState<P> (&state)[kStates], const RowOf& row_of, const ElementAt& element,
                        const Present& present, const Added& added) {
  StatisticsSums<P> part[kStates];
  MR_UNROLL for (int r = 0; r < kStates; ++r) part[r] = StatisticsSums<P>::none();
  MR_UNROLL for (int i = 0; i < kCount; ++i) {
    const ProgramElement<P> e = element(i);
    const ElementStatistics<P> statistics = P::statistics(e);
    added(i, statistics, state[row_of(i)].add(statistics, e.position, kAll || present(i), part[row_of(i)]));
  }
  MR_UNROLL for (int r = 0; r < kStates; ++r) state[r].sums.add(part[r]);
}
// Folds kCount elements into the states of kStates rows.
template <class P, int kCount, bool kAll, int kStates, class RowOf, class ElementAt, class Present>
MR_HD void fold_elements(StatisticsState<P> (&state)[kStates], const RowOf& row_of, const ElementAt& element,
                         const Present& present) {
  if constexpr (P::kSoftmaxes > 0) {
    Numbers<typename P::Real, P::kSoftmaxes> top[kStates];
    MR_UNROLL for (int r = 0; r < kStates; ++r) top[r] = state[r].frame;
    find_tops<P, kCount, kAll>(top, row_of, element, present);
    MR_UNROLL for (int r = 0; r < kStates; ++r) state[r].raise(top[r]);
  }
  add_elements<P, kCount, kAll>(state, row_of, element, present, [](auto&&...) {});
}

// The numbers that a call gives a program. row, column: [data, rows] and [data, columns] of the accumulation
// type T. row_index and column_index: the same for integers. first_column: the index of the first column
// here.
struct ProgramData {
  const void *row, *column;
  const std::int64_t *row_index, *column_index;
  std::int64_t row_pitch, column_pitch, row_index_pitch, column_index_pitch;
  std::int64_t rows, columns, first_column;
  double scale;  // scale of dot products
  ProgramTables tables;

  // The numbers of one of several batches, each of which has so many rows and columns.
  template <class P>
  MR_HD ProgramData of_batch(std::int64_t batch) const {
    using T = Scalar<typename P::Real>;
    ProgramData part = *this;
    part.row = static_cast<const T*>(row) + batch * rows;
    part.column = static_cast<const T*>(column) + batch * columns;
    part.row_index = row_index + batch * rows, part.column_index = column_index + batch * columns;
    return part;
  }
  template <class P>
  MR_HD ProgramRow<P> of_row(std::int64_t i) const {
    using R = typename P::Real;
    const auto* const numbers = static_cast<const Scalar<R>*>(row);
    ProgramRow<P> found{};
    MR_UNROLL for (int k = 0; k < P::kRowData; ++k) found.data[k] = R(numbers[k * row_pitch + i]);
    MR_UNROLL for (int k = 0; k < P::kRowIndices; ++k) found.index[k] =
        saturated<typename P::RowIndex>(row_index[k * row_index_pitch + i]);
    return found;
  }
  // score, other: scaled. An element beyond the last column gets the data of that column.
  template <class P>
  MR_HD ProgramElement<P> element(typename P::Real score, typename P::Real other, const ProgramRow<P>& of,
                                  std::int64_t j) const {
    using R = typename P::Real;
    const auto* const numbers = static_cast<const Scalar<R>*>(column);
    const std::int64_t there = j < columns ? j : columns - 1;
    ProgramElement<P> e{score, other, static_cast<Index<R>>(first_column + j), of, {}, {}, tables};
    MR_UNROLL for (int k = 0; k < P::kColumnData; ++k) e.column[k] = R(numbers[k * column_pitch + there]);
    MR_UNROLL for (int k = 0; k < P::kColumnIndices; ++k) e.column_index[k] =
        saturated<typename P::ColumnIndex>(column_index[k * column_index_pitch + there]);
    return e;
  }
};

// Where a row's statistics are stored: [numbers, rows] each, in the order of `Program`
// (monoidreduce/folds/program/program.py). low: the low words of the log-sum-exps. lowest: the column stored for a
// largest value of -inf: 0, or -1 if there are no columns.
struct StatisticsResults {
  void *values, *low;
  std::int64_t* indices;
  std::int64_t rows, lowest;

  template <class P>
  MR_HD void store(std::int64_t row, const StatisticsState<P>& state) const {
    using T = Scalar<typename P::Real>;
    using I = Index<typename P::Real>;
    T *value = static_cast<T*>(values) + row, *of_low = static_cast<T*>(low) + row;
    std::int64_t* index = indices + row;
    int k = 0;
    for (int s = 0; s < P::kSoftmaxes; ++s) {
      const T mass = scalar(state.sums.mass[s]);
      const LogNumber<T> lse = LogNumber<T>{scalar(state.frame[s]), T(0)} + log_number(mass);
      *value = lse.high, value += rows, *of_low = lse.low, of_low += rows;
      for (int end = k + P::kMeans[s]; k < end; ++k, value += rows)
        *value = mass == T(0) ? T(0) : scalar(state.sums.mean[k]) / mass;
    }
    for (int n = 0; n < P::kTotals; ++n, value += rows) *value = scalar(state.sums.total[n]);
    for (int n = 0; n < P::kLargest; ++n, value += rows, index += rows) {
      const I column = state.at[n];
      *value = scalar(state.largest[n]), *index = column == StatisticsState<P>::kNoColumn ? lowest : column;
    }
    for (int n = 0; n < P::kCarried; ++n, value += rows) *value = scalar(state.carried[n]);
    for (int n = 0; n < P::kCounts; ++n, index += rows) *index = state.count[n];
    for (int n = 0; n < P::kEntropies; ++n, value += rows)
      *value = Entropy<T>::of(scalar(state.sums.mass[P::kEntropyOf[n]]), scalar(state.sums.mean[k + n]));
  }
};

}  // namespace monoidreduce
