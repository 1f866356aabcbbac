// The host side of attention with functions of its scores (score_mod, mask_mod): the arguments of kernels
// that NVRTC compiled for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>

#include "monoidreduce/device/program/score_element.h"
#include "monoidreduce/device/simt/modified_simt.cuh"
#include "monoidreduce/launch/loaded_kernels.cuh"
#include "operator.h"

namespace monoidreduce::cuda {

// The handle of the kernel that was compiled for the call's program.
template <class Call>
std::int64_t kernel_of(const Call& x) {
  return std::get<std::int64_t>(x.program);
}

// The data of ModifiedScores, which are the same for every program.
template <class Call>
ModifiedScoresData scores_of(const Call& x) {
  const auto count = [](const TensorView& t) { return t.present() ? t.size[0] : std::int64_t{0}; };
  ModifiedScoresData scores{
      .tables = {x.table.data, data<std::int64_t>(x.table_index), count(x.table), count(x.table_index)},
      .blocks = data<std::int64_t>(x.blocks),
      .block_stride = {x.blocks.stride[0], x.blocks.stride[1], x.blocks.stride[2], x.blocks.stride[3]},
      .block_rows = static_cast<int>(x.options.block_rows),
      .block_columns = static_cast<int>(x.options.block_columns),
      .rows = static_cast<int>(x.q.size[2]),
      .columns = static_cast<int>(x.k.size[2]),
      .scale = static_cast<float>(x.options.scale),
      .size = {}};
  require(x.sizes.size() <= ModifiedScoresData::kMostSizes, "sizes: expected at most ",
          ModifiedScoresData::kMostSizes, ", got ", x.sizes.size());
  std::copy(x.sizes.begin(), x.sizes.end(), scores.size);
  if constexpr (requires { x.d_table; })
    scores.d_table = x.d_table.data, scores.table_integers = data<std::int64_t>(x.table_integers);
  return scores;
}

// The data of ProgramScores, which are the same for every program.
template <class T, class Call>
ProgramScoresData<T> program_scores(const Call& x) {
  // Indices have 32 bits, and tiles go beyond the last one.
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  require(std::max(x.q.size[2], x.k.size[2]) <= kMost, "q, k: expected at most ", kMost,
          " queries and keys beside functions of scores, got ", x.q.size[2], " and ", x.k.size[2]);
  return {scores_of(x), static_cast<T>(x.options.scale)};
}

}  // namespace monoidreduce::cuda
