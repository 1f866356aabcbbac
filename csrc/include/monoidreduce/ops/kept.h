// The results `kept` of forward passes: what they save for backward, for the first columns of a linear head.
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"

namespace monoidreduce {

// For planning: `kept` will have so many columns, if the plan's kernels can save dlogits (Plan::saved).
template <class Call>
constexpr auto saved_columns(std::int64_t Call::* member) {
  return option("saved_columns", member, "a number of columns >= 0",
                [](std::int64_t columns) { return columns >= 0; });
}

// rows, columns: of the head.
inline void check_kept(const TensorView& kept, const TensorView& rows, const TensorView& columns) {
  if (!kept.present()) return;
  const std::int64_t count = kept.size[1];
  require(kept.is_cuda(), "kept: expected none on the CPU, got a tensor");
  require(count <= columns.size[0], "kept: expected at most ", columns.size[0], " columns, got ", count);
  require(rows.size[0] <= 1 || kept.stride[0] >= (count + 7) / 8 * 8,
          "kept: expected lines padded to a multiple of 8 elements, got stride ", kept.stride[0]);
}
template <class Call>
void check_kept(const Call& x) {
  if constexpr (requires { x.weight; })
    check_kept(x.kept, x.x, x.weight);
  else
    check_kept(x.kept, x.a, x.b);
}

}  // namespace monoidreduce
