#include "../distillation.h"
#include "../element.h"
#include "linear_losses.h"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/fold_epilogue_sm90.cuh"
#include "monoidreduce/problems.h"
#include "monoidreduce/rows.h"
#include "natural.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Tile = ContractionTile<192, 5, 2>;

template <DistillationLoss kLoss>
struct DistillationResults {
  DistillationRows<float, kLoss> rows;
  using State = typename Distillation<Bits, kLoss>::State;
  __device__ std::int64_t label(std::int64_t) const { return -1; }
  __device__ void store(std::int64_t row, const State& s) const {
    // In bits: there the frames are the very scores that the expectation is made of, and equal ones cancel.
    using R = AccurateBits;
    const auto side = [](LogSumExp<Bits>::State x) -> LogSumExp<R>::State { return {x.frame.x, x.mass.x}; };
    const auto p = Distillation<R, kLoss>{}.project({side(s.student), side(s.teacher), s.cross.x});
    const auto lse = [](LogNumber<R> x) {
      return rounded<float>(LogNumber<double>{(double{x.high.x} + x.low.x) * kLn2, 0.});
    };
    rows.store(row, {lse(p.student_lse), lse(p.teacher_lse), static_cast<float>(natural(p.expectation)),
                     static_cast<float>(natural(p.loss))});
  }
};

}  // namespace

std::int64_t distillation_forward_scratch(const DistillationForward& x) {
  using M = Distillation<Bits, DistillationLoss::kCrossEntropy>;  // all have the same state
  return partial_bytes<M, Tile>(contraction_schedule<Tile>(distillation_problem(x))) /
         static_cast<std::int64_t>(sizeof(float));
}

void distillation_forward(const DistillationForward& x, const Launch& launch) {
  const FoldProblem problem = distillation_problem(x);
  with_element(x.x.dtype, [&](auto element) {
    with_loss(x.options.loss, [&](auto loss) {
      const DistillationResults<loss()> results{{.mask = static_cast<const bool*>(x.mask.data),
                                                 .mask_stride = x.mask.stride[0],
                                                 .rows = x.x.size[0],
                                                 .loss = static_cast<float*>(x.loss.data),
                                                 .stats = static_cast<float*>(x.stats.data),
                                                 .grad_loss = {}}};
      fold_contraction<decltype(element), Tile>(Distillation<Bits, loss()>{},
                                                ScaledScores<Bits>(problem.score, kLog2E), problem, results,
                                                x.scratch.data, launch);
    });
  });
}

}  // namespace monoidreduce::cuda::sm90
