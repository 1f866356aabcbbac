// The operator `attend` in the resident kernels: its scores are themselves the weights of the payload (no
// softmax), and of each row only the payload's sum is stored.
#pragma once

#include <cstdint>

#include "monoidreduce/device/resident/attention_rows.cuh"
#include "monoidreduce/monoids/sum.h"

namespace monoidreduce {

// The sum of weights. A masked element has weight 0.
template <class R>
struct WeightSum : Sum<R> {
  MR_HD R absent() const { return R(0); }
};

struct AttendRows : AttentionRows {
  template <class P>
  __device__ void store(std::int64_t, int, P, bool) const {}
};

// For float32 operands in planes: the place of the log-sum-exp has the mark of a row that must be computed again.
struct MarkedAttendRows : FullAttentionRows {
  template <class P>
  __device__ void store(std::int64_t row, int, P, bool right) const {
    lse[row] = right ? 0.f : NAN;
  }
};
struct RepairedAttendRows : RepairedAttentionRows {
  __device__ void store(std::int64_t, float) const {}
};

// The host passes the same kernel arguments for attend as for attention, so the types must have the same
// size.
static_assert(std::is_empty_v<WeightSum<Bits>> && std::is_empty_v<LogSumExp<Bits>>);
static_assert(sizeof(AttendRows) == sizeof(AttentionRows));
static_assert(sizeof(MarkedAttendRows) == sizeof(FullAttentionRows));
static_assert(sizeof(RepairedAttendRows) == sizeof(RepairedAttentionRows));

}  // namespace monoidreduce
