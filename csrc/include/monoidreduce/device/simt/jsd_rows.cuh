// The Jensen-Shannon divergence (distillation loss "jsd") of rows of stored scores, and its local gradients
// (dlogits). A team of threads takes one row at a time: a block, or a cluster of blocks (jsd_rows_sm90.cuh).
//
// Everything is in units of log 2. The largest score of the row is subtracted from its scores before they are
// multiplied by anything. So a constant that is added to all scores of a row costs no digits.
#pragma once

#include <cstdint>

#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/math.h"

namespace monoidreduce::simt {

// The scores of two distributions, [rows, columns] each; a line has room for whole vectors.
struct ScorePair {
  float* student;
  const float* teacher;
  std::int64_t rows, columns, student_pitch, teacher_pitch;
};

// Which rows are active. mask: [rows], or null if all are.
struct ActiveRows {
  const bool* mask;
  std::int64_t stride;
  __device__ __forceinline__ bool operator[](std::int64_t row) const {
    return mask == nullptr || mask[row * stride];
  }
};

// A distribution p over the classes of a row: log2 p = (score - frame) scale - log_mass. frame: the row max.
struct JsdSide {
  float frame, log_mass;
};
// What local gradients need of a row. centre: the mean of log2(p / m) under p.
struct JsdRow {
  JsdSide student, teacher;
  float centre;
};

// An element's probabilities p (student) and q (teacher), and log2(p / m) and log2(q / m) for the mixture m;
// each of these is 0 where p or q is.
struct JsdElement {
  float p, q, of_student, of_teacher;
};

// Math: exp2 and log2 for elements, and the packing of two of them. log_beta, log_rest: log2 of beta and of 1
// - beta.
template <class Math>
struct Jsd {
  float scale;  // log2(e) / temperature
  float beta, log_beta, log_rest;

  // With r = log2((1 - beta) p / (beta q)), log2(q / m) = -log_beta - softplus(r) and log2(p / m) = -log_rest
  // - softplus(-r). A class that is masked in one distribution has an infinite r.
  __device__ __forceinline__ JsdElement element(const JsdRow& row, float s, float t) const {
    const float log_p = (s - row.student.frame) * scale - row.student.log_mass;
    const float log_q = (t - row.teacher.frame) * scale - row.teacher.log_mass;
    const float p = Math::exp2(log_p), q = Math::exp2(log_q), r = log_p - log_q + (log_rest - log_beta);
    const float both = Math::log2(1.f + Math::exp2(-::fabsf(r)));
    return {p, q, p > 0.f ? -log_rest - ::fmaxf(-r, 0.f) - both : 0.f,
            q > 0.f ? -log_beta - ::fmaxf(r, 0.f) - both : 0.f};
  }
};

inline constexpr int kJsdVector = 8;  // elements that a thread processes at a time

struct JsdVectors {
  float student[kJsdVector], teacher[kJsdVector];
};
__device__ __forceinline__ void load_scores(float (&to)[kJsdVector], const float* line, std::int64_t column,
                                            std::int64_t columns) {
  struct alignas(16) Quad {
    float elements[4];
  };
#pragma unroll
  for (int quad = 0; quad < kJsdVector / 4; ++quad) {
    const Quad from = *reinterpret_cast<const Quad*>(line + column + 4 * quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[4 * quad + i] = from.elements[i];
  }
  if (column + kJsdVector > columns) {  // there are no classes beyond the last
#pragma unroll
    for (int i = 0; i < kJsdVector; ++i)
      if (column + i >= columns) to[i] = -infinity<float>();
  }
}
__device__ __forceinline__ JsdVectors load_vectors(const ScorePair& scores, std::int64_t row,
                                                   std::int64_t column) {
  JsdVectors v;
  load_scores(v.student, scores.student + row * scores.student_pitch, column, scores.columns);
  load_scores(v.teacher, scores.teacher + row * scores.teacher_pitch, column, scores.columns);
  return v;
}

// Reduces the values of all threads of a block by op. Each thread gets the same bits.
template <int kThreads, class T, class Op>
__device__ __forceinline__ T reduce_block(T value, Op op) {
  extern __shared__ __align__(32) unsigned char shared_bytes[];
  auto& of_warps = *reinterpret_cast<T(*)[kThreads / 32]>(shared_bytes);
  value = reduce_lanes<32>(value, op);
  __syncthreads();  // all have read what was there before
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[0];
#pragma unroll 1
  for (int warp = 1; warp < kThreads / 32; ++warp) value = op(value, of_warps[warp]);
  return value;
}

// A block as a team.
template <int kThreads_>
struct BlockTeam {
  static constexpr int kThreads = kThreads_;
  __device__ __forceinline__ int thread() const { return threadIdx.x; }
  __device__ __forceinline__ std::int64_t number() const { return blockIdx.x; }
  __device__ __forceinline__ std::int64_t teams() const { return gridDim.x; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  // kPlace: one of two, alternately.
  template <int kPlace, class T, class Op>
  __device__ __forceinline__ T reduce(T value, Op op) const {
    return reduce_block<kThreads>(value, op);
  }
  __device__ __forceinline__ void finish() const {}
};

// The sum of 2^((score - frame) scale) over elements; the frame is the largest of them.
template <class Math>
struct JsdMass {
  float largest = -infinity<float>(), sum = 0.f;

  // What is subtracted from the scores: the largest one, or 0 if that is -inf.
  __device__ __forceinline__ static float frame(float largest) {
    return largest == -infinity<float>() ? 0.f : largest;
  }
  __device__ __forceinline__ void add(const float (&elements)[kJsdVector], float scale) {
    float above = largest;  // fmaxf ignores NaN, which reaches the sum
#pragma unroll
    for (float x : elements) above = ::fmaxf(above, x);
    const float from = frame(above);
    sum *= Math::exp2((largest - from) * scale);
#pragma unroll
    for (float x : elements) sum += Math::exp2((x - from) * scale);
    largest = above;
  }
  __device__ __forceinline__ static JsdMass combine(const JsdMass& a, const JsdMass& b, float scale) {
    const float above = ::fmaxf(a.largest, b.largest), from = frame(above);
    const float of_a = a.sum * Math::exp2((a.largest - from) * scale);
    return {above, of_a + b.sum * Math::exp2((b.largest - from) * scale)};
  }
  __device__ __forceinline__ JsdSide side() const { return {frame(largest), ::log2f(sum)}; }
};
template <class Math>
struct JsdMasses {
  JsdMass<Math> student, teacher;
};

// Sums over the classes of a row. The masses are 1 except for rounding.
struct JsdSums {
  float of_student = 0.f, of_teacher = 0.f, student_mass = 0.f, teacher_mass = 0.f;

  __device__ __forceinline__ static JsdSums combine(const JsdSums& a, const JsdSums& b) {
    return {a.of_student + b.of_student, a.of_teacher + b.of_teacher, a.student_mass + b.student_mass,
            a.teacher_mass + b.teacher_mass};
  }
};

// Writes local gradients in 16 bits over the student's scores. In each step all threads read columns before
// any writes their gradients. These land at half the distance from the start of the line, where everything
// has been read.
template <class Math, class Team>
__device__ __forceinline__ void write_jsd_gradients(const Team& team, const Jsd<Math>& jsd,
                                                    const ScorePair& scores, std::int64_t row,
                                                    const JsdRow& of_row, bool counted, float factor) {
  struct alignas(16) Words {
    unsigned words[kJsdVector / 2];
  };
  unsigned* const out = reinterpret_cast<unsigned*>(scores.student + row * scores.student_pitch);
#pragma unroll 1
  for (std::int64_t first = 0; first < scores.columns; first += Team::kThreads * kJsdVector) {
    const std::int64_t column = first + team.thread() * kJsdVector;
    Words gradients{};
    if (counted && column < scores.columns) {
      const JsdVectors v = load_vectors(scores, row, column);
#pragma unroll
      for (int i = 0; i < kJsdVector; i += 2) {
        float pair[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const JsdElement e = jsd.element(of_row, v.student[i + k], v.teacher[i + k]);
          pair[k] = factor * e.p * (e.of_student - of_row.centre);
        }
        gradients.words[i / 2] = Math::pack(pair[0], pair[1]);
      }
    }
    team.sync();
    if (column < scores.columns) *reinterpret_cast<Words*>(out + column / 2) = gradients;
  }
}

// losses, stats: [rows]. factor: of local gradients with respect to scores in natural units; null: no
// gradients are written.
template <class Math, class Team>
__device__ __forceinline__ void jsd_rows(const Team& team, const Jsd<Math>& jsd, const ScorePair& scores,
                                         const ActiveRows& counted, float* losses, JsdRow* stats,
                                         const float* factor) {
  const auto for_each_vector = [&](std::int64_t row, auto take) {
#pragma unroll 1
    for (std::int64_t column = team.thread() * kJsdVector; column < scores.columns;
         column += Team::kThreads * kJsdVector)
      take(load_vectors(scores, row, column));
  };
#pragma unroll 1
  for (std::int64_t row = team.number(); row < scores.rows; row += team.teams()) {
    JsdRow of_row{};
    float loss = 0.f;
    if (counted[row]) {
      JsdMasses<Math> masses;
      for_each_vector(row, [&](const JsdVectors& v) {
        masses.student.add(v.student, jsd.scale), masses.teacher.add(v.teacher, jsd.scale);
      });
      masses = team.template reduce<0>(masses, [&](const auto& a, const auto& b) {
        return JsdMasses<Math>{JsdMass<Math>::combine(a.student, b.student, jsd.scale),
                               JsdMass<Math>::combine(a.teacher, b.teacher, jsd.scale)};
      });
      of_row.student = masses.student.side(), of_row.teacher = masses.teacher.side();

      JsdSums sums;
      for_each_vector(row, [&](const JsdVectors& v) {
#pragma unroll
        for (int i = 0; i < kJsdVector; ++i) {
          const JsdElement e = jsd.element(of_row, v.student[i], v.teacher[i]);
          sums = JsdSums::combine(sums, {e.p * e.of_student, e.q * e.of_teacher, e.p, e.q});
        }
      });
      sums =
          team.template reduce<1>(sums, [](const auto& a, const auto& b) { return JsdSums::combine(a, b); });
      of_row.centre = sums.of_student + sums.of_student * (1.f - sums.student_mass);
      const float of_teacher = sums.of_teacher + sums.of_teacher * (1.f - sums.teacher_mass);
      loss = static_cast<float>(kLn2) * (jsd.beta * of_teacher + (1.f - jsd.beta) * of_row.centre);
    }
    if (team.thread() == 0) losses[row] = loss, stats[row] = of_row;
    if (factor != nullptr)
      write_jsd_gradients(team, jsd, scores, row, of_row, counted[row], static_cast<float>(kLn2) * *factor);
  }
  team.finish();
}

template <class Math, int kThreads>
__global__ void __launch_bounds__(kThreads, 2)
    jsd_rows_kernel(const Jsd<Math> jsd, const ScorePair scores, const ActiveRows counted, float* losses,
                    JsdRow* stats, const float* factor) {
  jsd_rows(BlockTeam<kThreads>{}, jsd, scores, counted, losses, stats, factor);
}

template <class Math, int kThreads>
__global__ void __launch_bounds__(kThreads, 2)
    jsd_gradient_kernel(const Jsd<Math> jsd, const ScorePair scores, const ActiveRows counted,
                        const JsdRow* stats, const float* factor) {
#pragma unroll 1
  for (std::int64_t row = blockIdx.x; row < scores.rows; row += gridDim.x)
    write_jsd_gradients(BlockTeam<kThreads>{}, jsd, scores, row, stats[row], counted[row],
                        static_cast<float>(kLn2) * *factor);
}

}  // namespace monoidreduce::simt
