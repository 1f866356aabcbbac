// The shape of a problem, as the resident kernels and their tile scheduler (schedule.cuh) take it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/schedule/schedule.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/job_split.h"
#include "monoidreduce/launch/sections.h"

namespace monoidreduce {

// Whether the heads of a batch, or the batches of a head, share a bias that differs between rows.
inline bool heads_share_bias(const FoldProblem& p) {
  return p.bias.present() && p.bias.stride[2] != 0 && p.heads() > 1 && p.bias.stride[1] == 0;
}
inline bool batches_share_bias(const FoldProblem& p) {
  return p.bias.present() && p.bias.stride[2] != 0 && p.batch() > 1 && p.bias.stride[0] == 0;
}

// section: the number of batch-heads in a section (schedule.cuh).
inline FoldShape fold_shape(const FoldProblem& p, std::int64_t section) {
  return {.batch = static_cast<int>(p.batch()),
          .heads = static_cast<int>(p.heads()),
          .group = static_cast<int>(p.heads() / p.column_heads()),
          .rows = static_cast<int>(p.rows()),
          .columns = static_cast<int>(p.columns()),
          .band = Band(p.range),
          .row_spans = p.range.of_rows,
          .column_spans = p.range.of_columns,
          .masked_by_bias = excludes(p.bias),
          .batches_follow = batches_share_bias(p) && !heads_share_bias(p),
          .section = static_cast<int>(section)};
}

// The number of batch-heads whose operands fit into the L2 cache together, if `group` of them read `bytes`.
inline std::int64_t cached_heads(const FoldProblem& p, std::int64_t bytes, std::int64_t group) {
  return std::clamp(kSectionBytes / bytes * group, std::int64_t(1), p.batch() * p.heads());
}

// The number of batch-heads in a section. One suffices if all jobs are equally long and none share a bias.
inline std::int64_t section_of(const FoldProblem& p, std::int64_t bytes, std::int64_t group) {
  if (p.range.all() && !heads_share_bias(p) && !batches_share_bias(p)) return 1;
  return cached_heads(p, bytes, group);
}

}  // namespace monoidreduce
