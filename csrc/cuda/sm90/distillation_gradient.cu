#include "../distillation.h"
#include "../element.h"
#include "linear_losses.h"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/gradient_epilogue_sm90.cuh"
#include "monoidreduce/problems.h"
#include "monoidreduce/rows.h"
#include "natural.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

// A stage less than the forward pass has: the slabs take its place.
using Tile = ContractionTile<192, 4, 2>;

template <class R, DistillationLoss kLoss>
struct DistillationGradientRows {
  DistillationRows<float, kLoss> rows;
  using Output = typename Distillation<R, kLoss>::Output;

  __device__ int label(std::int64_t) const { return -1; }
  // Without a part in the loss a row weighs nothing, whatever its statistics.
  __device__ Output product(std::int64_t row) const {
    constexpr LogNumber<R> kNothing{HUGE_VALF, 0.f};
    if (!rows.active(row)) return {kNothing, kNothing, 0.f, 0.f};
    const auto p = rows.product(row);
    const auto in_r = [](LogNumber<float> x) { return LogNumber<R>{x.high, x.low}; };
    return {in_r(p.student_lse), in_r(p.teacher_lse), p.expectation, 0.f};
  }
  __device__ bool far(const Output& p) const { return is_far(p.student_lse) || is_far(p.teacher_lse); }
  __device__ R upstream(std::int64_t row, R unit) const {
    return rows.active(row) ? rows.upstream(row) * unit : R(0);
  }
};

}  // namespace

// In natural units: the expectation makes some of the gradients numbers with a unit, and others not.
void distillation_local_gradient(const DistillationLocalGradient& x, const Launch& launch) {
  const FoldProblem problem = distillation_problem(x);
  with_element(x.x.dtype, [&](auto element) {
    with_loss(x.options.loss, [&](auto loss) {
      using E = decltype(element);
      using R = Fast<E>;
      const DistillationGradientRows<R, loss()> rows{
          {.mask = static_cast<const bool*>(x.mask.data),
           .mask_stride = x.mask.stride[0],
           .rows = x.x.size[0],
           .loss = nullptr,
           .stats = static_cast<float*>(x.stats.data),
           .grad_loss = {static_cast<float*>(x.grad_loss.data), x.grad_loss.stride[0]}}};
      const Distillation<R, loss()> m;
      const ScaledScores<R> scores(problem.score, 1.);
      if (x.teacher_out.present()) {
        local_gradient<E, Tile>(m, scores, problem, rows, {as_rows(x.out), as_rows(x.teacher_out)}, {},
                                launch);
      } else {
        local_gradient<E, Tile>(m, scores, problem, rows, {as_rows(x.out)}, {}, launch);
      }
    });
  });
}

}  // namespace monoidreduce::cuda::sm90
