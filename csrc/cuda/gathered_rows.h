// Rows in an order, for kernels that read them as they lie: they are gathered, as many at a time as there is room for.
#pragma once

#include <algorithm>

#include "monoidreduce/operators.h"
#include "monoidreduce/problems.h"

namespace monoidreduce::cuda {

// `count` rows from the first one on.
inline TensorView some_rows(const TensorView& rows, std::int64_t first, std::int64_t count) {
  TensorView part = as_rows(rows);
  part.size[2] = count;
  part.data = static_cast<char*>(rows.data) + first * rows.stride[0] * item_size(rows.dtype);
  return part;
}

// `count` rows from place `first` of the order on, in room; it is left as it is where all rows count.
inline TensorView gather(const TensorView& rows, const TensorView& room, const TensorView& order,
                         std::int64_t first, std::int64_t count, const Launch& launch) {
  TensorView part = room;
  part.size[0] = count;
  cuda::scale_rows({.x = rows,
                    .out = part,
                    .factor = {},
                    .order = order,
                    .first_place = first,
                    .needed_if_all_count = false},
                   launch);
  return as_rows(part);
}

// Calls run(part) with one part of the call's problem after another, of most_of(rows left) rows, or as many as there is room for.
template <class Arguments, class MostOf, class Run>
void in_parts(const Arguments& x, const FoldProblem& problem, const Launch& launch, MostOf most_of, Run run) {
  const bool gathers = x.order.present();
  std::int64_t count = 0;
  for (std::int64_t first = 0; first < problem.rows(); first += count) {
    const std::int64_t left = problem.rows() - first;
    count = std::min({most_of(left), left, gathers ? x.gathered.size[0] : left});
    FoldProblem part = problem;
    part.first_place = first, part.places = problem.rows();
    part.a = part.ungathered_a = some_rows(x.x, first, count);
    if (gathers) part.a = gather(x.x, x.gathered, x.order, first, count, launch);
    if constexpr (requires { x.teacher_x; }) {
      part.other_a = part.ungathered_other_a = some_rows(x.teacher_x, first, count);
      if (gathers) part.other_a = gather(x.teacher_x, x.teacher_gathered, x.order, first, count, launch);
    }
    run(part);
  }
}

template <class Arguments, class Run>
void in_gathered_parts(const Arguments& x, const FoldProblem& problem, const Launch& launch, Run run) {
  if (!x.order.present()) return run(problem);
  in_parts(x, problem, launch, [](std::int64_t left) { return left; }, run);
}

}  // namespace monoidreduce::cuda
