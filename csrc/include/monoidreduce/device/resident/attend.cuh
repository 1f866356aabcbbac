// attend in the resident kernels: a fold whose elements are weights, and of whose rows nothing but the payload's sum is kept.
#pragma once

#include <cstdint>

#include "monoidreduce/device/resident/attention_rows.cuh"
#include "monoidreduce/monoids/sum.h"

namespace monoidreduce {

// An element that a row does not keep weighs nothing.
template <class R>
struct WeightSum : Sum<R> {
  MR_HD R absent() const { return R(0); }
};

struct AttendRows : AttentionRows {
  template <class P>
  __device__ void store(std::int64_t, int, P, bool) const {}
};

// The host passes the same arguments to both.
static_assert(std::is_empty_v<WeightSum<Bits>> && std::is_empty_v<LogSumExp<Bits>>);
static_assert(sizeof(AttendRows) == sizeof(AttentionRows));

}  // namespace monoidreduce
