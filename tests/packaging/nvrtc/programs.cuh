// A program as the library generates it (monoidreduce/folds/cuda/cuda_source.py), for test_nvrtc_kernels.py.
#pragma once

#include "monoidreduce/device/program/statistics.h"

namespace user {

using namespace monoidreduce;

// The log-sum-exp, the mean score, the entropy, the largest of a row's data times the score with the score
// that it carries, and the mean of a payload.
template <class R>
struct Program {
  using Real = R;
  using RowIndex = Index<R>;
  using ColumnIndex = Index<R>;
  static constexpr int kScores = 1, kRowData = 1, kRowIndices = 0, kColumnData = 0, kColumnIndices = 0;
  static constexpr int kSoftmaxes = 1, kTotals = 0, kLargest = 1, kCounts = 0, kWeights = 1, kVectors = 1,
                       kMost = 0, kEntropies = 1, kCarried = 1, kLines = 9;
  static constexpr int kMeans[] = {1}, kEntropyOf[] = {0}, kSoftmaxOf[] = {0}, kCountOf[] = {-1};
  static constexpr bool kBounded = true;
  static constexpr int kOperands = 1, kSums = 1;
  MR_HD static ElementStatistics<Program> statistics(const ProgramElement<Program>& e) {
    ElementStatistics<Program> to{};
    to.log_weight[0] = to.mean[0] = e.score, to.largest[0] = e.score * e.row.data[0];
    to.carried[0] = e.score, to.factor[0] = R(1);
    return to;
  }
  MR_HD static void bound(const ProgramElement<Program>&, std::int64_t& first, std::int64_t& end) {
    first = 1, end = 100;
  }
  MR_HD static Gradient<R> gradient(const ProgramElement<Program>& e) {
    return {e.row.data[0] * e.score, R(0)};
  }
  MR_HD static ElementGradients<Program> pulled(const ProgramElement<Program>& e) {
    return {e.row.data[0] * e.score, R(0), {e.score}};
  }
};

}  // namespace user
