// A program (device/program/statistics.h) with narrow operands, on any GPU: rows of the operands fit in
// registers. Computes its fold, and the gradients of rows (their operands and their data). For gradients of
// columns the same kernels run with rows and columns exchanged.
//
// A thread, or four lanes that share the width, owns four rows and walks the columns. A block stages the
// columns in shared memory, kColumns at a time. A number from shared memory is used in four multiply-adds. If
// rows are few, several blocks share the columns.
#pragma once

#include "monoidreduce/device/block/matrix.cuh"
#include "monoidreduce/device/program/statistics.h"
#include "monoidreduce/device/simt/program_simt.cuh"

namespace monoidreduce::simt::narrow {

inline constexpr int kThreads = 128;
inline constexpr int kColumns = 64;  // columns that are staged at a time
inline constexpr int kRows = 4;      // rows of a group of lanes
MR_HD constexpr int rows_of_block(int lanes) { return kThreads / lanes * kRows; }

// How the work is split: a block takes some rows and one of `parts` parts of the columns.
struct Parts {
  std::int64_t row_blocks, parts;
};
// The work of a thread's group of lanes: rows from row0 on, and the columns [begin, end). A lane has the
// elements of kOwn of the rows.
template <int kLanes>
struct Work {
  static constexpr int kOwn = kRows / kLanes;
  std::int64_t row0, part, begin, end;
  int lane;

  __device__ __forceinline__ Work(const Parts& p, std::int64_t columns)
      : row0(blockIdx.x % p.row_blocks * rows_of_block(kLanes) + threadIdx.x / kLanes * kRows),
        part(blockIdx.x / p.row_blocks),
        lane(threadIdx.x % kLanes) {
    const std::int64_t steps = divide_up(columns, kColumns);
    begin = part * steps / p.parts * kColumns;
    end = min((part + 1) * steps / p.parts * kColumns, columns);
  }
  __device__ __forceinline__ std::int64_t own_row(int i) const { return row0 + lane * kOwn + i; }
};

// Sums over lanes: v[r] is a lane's summand for row r; afterwards v[i] is the sum for its own row i.
template <int kLanes, class T>
__device__ __forceinline__ void sum_lanes(T (&v)[kRows], int lane) {
#pragma unroll
  for (int apart = kLanes / 2, left = kRows / 2; apart > 0; apart /= 2, left /= 2) {
    const bool upper = lane & apart;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const T given = __shfl_xor_sync(~0u, upper ? v[i] : v[i + left], apart);
      v[i] = (upper ? v[i + left] : v[i]) + given;
    }
  }
}
// The value of row r, from the lane that owns it.
template <int kLanes, class T>
__device__ __forceinline__ T of_row(const T (&own)[kRows / kLanes], int r) {
  constexpr int kOwn = kRows / kLanes;
  return kLanes == 1 ? own[r % kOwn] : __shfl_sync(~0u, own[r % kOwn], r / kOwn, kLanes);
}

// A lane's numbers of a line of kWidth: every kLanes-th vector of 16 bytes. Beyond the operand's width they
// are 0.
template <class T, int kWidth, int kLanes>
struct Slice {
  static constexpr int kVector = 16 / sizeof(T), kLength = kWidth / kLanes;
  static_assert(kWidth % (kVector * kLanes) == 0);
  T at[kLength > 0 ? kLength : 1];

  __device__ __forceinline__ static int place(int k, int lane) {
    return (k / kVector * kLanes + lane) * kVector + k % kVector;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < kLength; ++k) at[k] = T(0);
  }
  __device__ __forceinline__ void load(const Tensor& t, std::int64_t row, int lane) {
    const Matrix<T> m(t, 0, 0);
#pragma unroll
    for (int k = 0; k < kLength; ++k)
      at[k] = row < m.rows() && place(k, lane) < m.width() ? m.read(row, place(k, lane)) : T(0);
  }
  __device__ __forceinline__ void load(const T* line, int lane) {
#pragma unroll
    for (int k = 0; k < kLength; ++k) at[k] = line[place(k, lane)];
  }
  __device__ __forceinline__ T dot(const Slice& x) const {
    T sum = T(0);
#pragma unroll
    for (int k = 0; k < kLength; ++k) sum = multiply_add(at[k], x.at[k], sum);
    return sum;
  }
  __device__ __forceinline__ void add(T factor, const Slice& x) {
#pragma unroll
    for (int k = 0; k < kLength; ++k) at[k] = multiply_add(factor, x.at[k], at[k]);
  }
};

// kColumns columns in shared memory: their operands and their data. Beyond the last column they repeat its
// numbers.
template <class P, int kWidth, int kOther>
struct Stage {
  using T = typename P::Real;
  alignas(16) T operand[kColumns][kWidth];
  alignas(16) T other[kColumns][kOther > 0 ? kOther : 1];
  Numbers<T, P::kColumnData> data[kColumns];
  Numbers<typename P::ColumnIndex, P::kColumnIndices> index[kColumns];

  __device__ __forceinline__ void load(const ProgramOperands& p, const ProgramData& from,
                                       std::int64_t column0) {
    load_operands(operand, p.columns[0], column0);
    if constexpr (kOther > 0) load_operands(other, p.columns[1], column0);
    if (threadIdx.x < kColumns) {
      const std::int64_t column = min(column0 + threadIdx.x, from.columns - 1);
      const T* const numbers = static_cast<const T*>(from.column);
#pragma unroll
      for (int k = 0; k < P::kColumnData; ++k) data[threadIdx.x][k] = numbers[k * from.column_pitch + column];
#pragma unroll
      for (int k = 0; k < P::kColumnIndices; ++k)
        index[threadIdx.x][k] =
            saturated<typename P::ColumnIndex>(from.column_index[k * from.column_index_pitch + column]);
    }
  }

 private:
  template <int kLength>
  __device__ __forceinline__ static void load_operands(T (&to)[kColumns][kLength], const Tensor& t,
                                                       std::int64_t column0) {
    const Matrix<T> m(t, 0, 0);
    const std::int64_t last = m.rows() - 1;
#pragma unroll 8
    for (int at = threadIdx.x; at < kColumns * kLength; at += kThreads) {
      const int c = at / kLength, k = at % kLength;
      to[c][k] = k < m.width() ? m.read(min(column0 + c, last), k) : T(0);
    }
  }
};

// The rows of a group, and the calling lane's elements of them for staged columns.
template <class P, int kWidth, int kOther, int kLanes>
struct Rows {
  using T = typename P::Real;
  using First = Slice<T, kWidth, kLanes>;
  using Second = Slice<T, kOther, kLanes>;
  static constexpr int kOwn = kRows / kLanes;
  const ProgramData& data;
  First operand[kRows];
  Second other[kRows];
  ProgramRow<P> numbers[kOwn];
  int lane;

  __device__ __forceinline__ Rows(const ProgramOperands& p, const ProgramData& data, const Work<kLanes>& work)
      : data(data), lane(work.lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      operand[r].load(p.rows[0], work.row0 + r, lane);
      if constexpr (kOther > 0) other[r].load(p.rows[1], work.row0 + r, lane);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) numbers[i] = data.of_row<P>(min(work.own_row(i), data.rows - 1));
  }
  // The scores of the lane's own rows in a column.
  template <class Slice>
  __device__ __forceinline__ void scores(T (&to)[kOwn], const Slice (&rows)[kRows],
                                         const Slice& column) const {
    T dots[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) dots[r] = rows[r].dot(column);
    sum_lanes<kLanes>(dots, lane);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) to[i] = multiply_add(dots[i], static_cast<T>(data.scale), T(-0.f));
  }
  // The element of own row i in staged column c.
  __device__ __forceinline__ ProgramElement<P> element(const Stage<P, kWidth, kOther>& stage, T score,
                                                       T second, int i, int c, std::int64_t column0) const {
    return {score,      second,        static_cast<Index<T>>(data.first_column + column0 + c),
            numbers[i], stage.data[c], stage.index[c],
            data.tables};
  }
};

template <bool kAll, class P, int kWidth, int kOther, int kLanes>
__device__ __forceinline__ void fold_staged(StatisticsState<P> (&state)[kRows / kLanes],
                                            const Rows<P, kWidth, kOther, kLanes>& rows,
                                            const Stage<P, kWidth, kOther>& stage, std::int64_t column0,
                                            std::int64_t end) {
  using T = typename P::Real;
  using R = Rows<P, kWidth, kOther, kLanes>;
  constexpr int kOwn = kRows / kLanes, kCount = kOwn == 1 ? 8 : 4;  // columns that are folded at a time
#pragma unroll 1
  for (int first = 0; first < kColumns; first += kCount) {
    T score[kCount][kOwn], second[kCount][kOwn] = {};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      typename R::First column;
      column.load(stage.operand[first + n], rows.lane);
      rows.scores(score[n], rows.operand, column);
      if constexpr (kOther > 0) {
        typename R::Second other;
        other.load(stage.other[first + n], rows.lane);
        rows.scores(second[n], rows.other, other);
      }
    }
    fold_elements<P, kCount * kOwn, kAll>(
        state, [](int e) { return e % kOwn; },
        [&](int e) {
          const int n = e / kOwn, i = e % kOwn;
          return rows.element(stage, score[n][i], second[n][i], i, first + n, column0);
        },
        [&](int e) { return column0 + first + e / kOwn < end; });
  }
}

// The fold. splits: the number of parts, and their states [parts, rows], which combine_states() (program_simt.cuh)
// combines. A thread has the states of four rows, or of one.
template <class P, int kWidth, int kOther, int kLanes>
__global__ void __launch_bounds__(kThreads, kLanes == 1 ? 2 : 3)
    fold_narrow(const __grid_constant__ ProgramOperands p, const __grid_constant__ ProgramData data,
                const __grid_constant__ StatisticsResults results, const __grid_constant__ Parts parts,
                const __grid_constant__ Splits splits) {
  constexpr int kOwn = kRows / kLanes;
  __shared__ Stage<P, kWidth, kOther> stage;
  const StatisticsSum<P> sum;
  const Work<kLanes> work(parts, data.columns);
  const Rows<P, kWidth, kOther, kLanes> rows(p, data, work);
  StatisticsState<P> state[kOwn];
  StatisticsSums<P> low[kOwn] = {};
#pragma unroll
  for (auto& s : state) s = sum.identity();
#pragma unroll 1
  for (std::int64_t column0 = work.begin; column0 < work.end; column0 += kColumns) {
    __syncthreads();
    stage.load(p, data, column0);
    __syncthreads();
    // The states of the staged columns are combined once: errors grow with the columns of a stage plus the
    // stages, not with their product.
    StatisticsState<P> staged[kOwn];
#pragma unroll
    for (auto& s : staged) s = sum.identity();
    if (column0 + kColumns <= work.end)
      fold_staged<true>(staged, rows, stage, column0, work.end);
    else
      fold_staged<false>(staged, rows, stage, column0, work.end);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum.add(state[i], low[i], staged[i]);
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    state[i].sums.add(low[i]);
    const std::int64_t row = work.own_row(i);
    if (row >= data.rows) continue;
    if (splits.count == 1)
      results.store<P>(row, state[i]);
    else
      static_cast<StatisticsState<P>*>(splits.partial)[work.part * data.rows + row] = state[i];
  }
}

// Gradients of rows, separately for each part: [parts, rows, width]; and sums for the rows' data, [parts,
// sums, rows]. Absent: not wanted.
struct RowGradients {
  void* operand[2];
  void* sums;
  std::int64_t width[2];
};

// The gradient of a group's rows with respect to one operand: a sum of local gradients times columns.
template <class Slice>
struct OperandGradient {
  Slice sum[kRows];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& s : sum) s.clear();
  }
  // local: the local gradients of the lane's own rows.
  template <int kLanes, class T>
  __device__ __forceinline__ void add(const T (&local)[kRows / kLanes], const Slice& column) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r].add(of_row<kLanes>(local, r), column);
  }
  // to: the gradient of the group's first row, written the first time and added to later. rows: how many rows
  // there are from it on.
  template <class T>
  __device__ __forceinline__ void flush(T* to, std::int64_t rows, std::int64_t width, T scale, bool first,
                                        int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int k = 0; k < Slice::kLength; ++k) {
        const int place = Slice::place(k, lane);
        if (r < rows && place < width)
          to[r * width + place] = sum[r].at[k] * scale + (first ? T(0) : to[r * width + place]);
      }
    clear();
  }
};

// The gradients of rows. P::pulled(element): the gradients with respect to the scores and the row's data
// (cuda_source.py). P::kOperands: gradients with respect to the operands are wanted.
template <class P, int kWidth, int kOther, int kLanes>
__global__ void __launch_bounds__(kThreads, 2)
    pull_narrow(const __grid_constant__ ProgramOperands p, const __grid_constant__ ProgramData data,
                const __grid_constant__ RowGradients to, const __grid_constant__ Parts parts) {
  using T = typename P::Real;
  using R = Rows<P, kWidth, kOther, kLanes>;
  constexpr int kOwn = kRows / kLanes, kCount = 2;  // columns at a time
  // Number of columns after which gradients are added to memory: sums of sums lose fewer digits.
  constexpr std::int64_t kFlushed = 1024;
  __shared__ Stage<P, kWidth, kOther> stage;
  const Work<kLanes> work(parts, data.columns);
  const R rows(p, data, work);
  OperandGradient<typename R::First> gradient;
  OperandGradient<typename R::Second> other_gradient;
  Numbers<T, P::kSums> sums[kOwn] = {};
  if constexpr (P::kOperands) gradient.clear(), other_gradient.clear();
#pragma unroll 1
  for (std::int64_t column0 = work.begin; column0 < work.end; column0 += kColumns) {
    __syncthreads();
    stage.load(p, data, column0);
    __syncthreads();
    Numbers<T, P::kSums> staged[kOwn] = {};
#pragma unroll 1
    for (int first = 0; first < kColumns; first += kCount) {
      typename R::First column[kCount];
      typename R::Second other[kCount];
      T score[kCount][kOwn], second[kCount][kOwn] = {};
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        column[n].load(stage.operand[first + n], rows.lane);
        rows.scores(score[n], rows.operand, column[n]);
        if constexpr (kOther > 0) {
          other[n].load(stage.other[first + n], rows.lane);
          rows.scores(second[n], rows.other, other[n]);
        }
      }
#pragma unroll
      for (int n = 0; n < kCount; ++n)
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          ElementGradients<P> pulled =
              P::pulled(rows.element(stage, score[n][i], second[n][i], i, first + n, column0));
          if (column0 + first + n >= work.end) pulled = {};
          score[n][i] = pulled.score, second[n][i] = pulled.other;
#pragma unroll
          for (int k = 0; k < P::kSums; ++k) staged[i][k] += pulled.sums[k];
        }
      if constexpr (P::kOperands) {
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
          gradient.template add<kLanes>(score[n], column[n]);
          if constexpr (kOther > 0) other_gradient.template add<kLanes>(second[n], other[n]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) sums[i][k] += staged[i][k];
    if constexpr (P::kOperands) {
      const std::int64_t done = column0 + kColumns - work.begin;
      if (done % kFlushed == 0 || column0 + kColumns >= work.end) {
        const T scale = static_cast<T>(data.scale);
        const std::int64_t place = work.part * data.rows + work.row0, there = data.rows - work.row0;
        const auto of = [&](int n) { return static_cast<T*>(to.operand[n]) + place * to.width[n]; };
        gradient.flush(of(0), there, to.width[0], scale, done <= kFlushed, rows.lane);
        if constexpr (kOther > 0)
          other_gradient.flush(of(1), there, to.width[1], scale, done <= kFlushed, rows.lane);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const std::int64_t row = work.own_row(i);
    if (row >= data.rows) continue;
#pragma unroll
    for (int k = 0; k < P::kSums; ++k)
      static_cast<T*>(to.sums)[(work.part * P::kSums + k) * data.rows + row] = sums[i][k];
  }
}

}  // namespace monoidreduce::simt::narrow
