// Gathers rows in an order (row_order.cuh) into a copy, for kernels that read rows where they are: as many at
// a time as there is room for.
#pragma once

#include <algorithm>

#include "engine.h"
#include "monoidreduce/ops/rows.h"

namespace monoidreduce::cuda {

// Gathers rows from place `first` of the order on, as many as fit in `room`.
inline TensorView gather(const TensorView& rows, const TensorView& room, const TensorView& order,
                         std::int64_t first, const Launch& launch) {
  TensorView part = room;
  part.size[0] = std::min(room.size[0], rows.size[0] - first);
  cuda::run(RowScaling{.x = rows, .out = part, .factor = {}, .order = order, .first_place = first}, launch);
  return as_rows(part);
}

// Calls run(part) for one part of the call's problem after another, with gathered rows; for the problem
// itself if there is no order.
template <class Arguments, class Run>
void in_gathered_parts(const Arguments& x, const FoldProblem& problem, const Launch& launch, Run run) {
  if (!x.order.present()) return run(problem);
  for (std::int64_t first = 0; first < problem.rows(); first += x.gathered.size[0]) {
    FoldProblem part = problem;
    part.first_place = first, part.places = problem.rows();
    part.a = gather(x.x, x.gathered, x.order, first, launch);
    if constexpr (requires { x.teacher_x; })
      part.other_a = gather(x.teacher_x, x.teacher_gathered, x.order, first, launch);
    run(part);
  }
}

}  // namespace monoidreduce::cuda
