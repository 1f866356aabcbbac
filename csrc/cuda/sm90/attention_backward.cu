#include "attention.h"
#include "element.h"
#include "monoidreduce/block/fast_real.cuh"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/fold_backward_sm90.cuh"
#include "monoidreduce/kernel/repair.cuh"
#include "monoidreduce/kernel/row_residuals.cuh"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/problems.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Width64 = BackwardTile<64, 128>;
using Width128 = BackwardTile<128, 64>;

// The rows' part of the scratch, one behind the other.
struct Scratch {
  RowResiduals residuals;
  RowMarks marks;
  std::int64_t size;

  Scratch(const AttentionBackward& x, float* at) {
    constexpr std::int64_t kPadding = 128;
    const std::int64_t heads = x.q.size[0] * x.q.size[1], column_heads = x.k.size[0] * x.k.size[1];
    const std::int64_t padded = (x.q.size[2] + kPadding - 1) / kPadding * kPadding;
    const std::int64_t row_units = padded / RowMarks::kUnit,
                       column_units = (x.k.size[2] + RowMarks::kUnit - 1) / RowMarks::kUnit;
    const std::int64_t parts[4] = {heads * padded, heads * padded, heads * row_units,
                                   column_heads * column_units};
    float* part[4];
    size = 0;
    for (int n = 0; n < 4; ++n) part[n] = at + size, size += (parts[n] + 3) / 4 * 4;  // on 16-byte boundaries
    residuals = {part[0], part[1], static_cast<int>(padded)};
    marks = {part[2], part[3], static_cast<int>(row_units), static_cast<int>(column_units)};
  }
};

// RowPolicy of the rows that are computed again.
struct RepairedRows {
  const float *lse, *lse_low;  // [rows]
  RowResiduals residuals;
  std::int64_t rows;  // of a head
  float inverse_scale;
  __device__ LogNumber<float> product(std::int64_t row) const { return {lse[row], lse_low[row]}; }
  __device__ float upstream(std::int64_t row) const {
    return residuals.upstream[row / rows * residuals.padded_rows + row % rows] * inverse_scale;
  }
};

template <class E, class Tile>
void run(const AttentionBackward& x, const Scratch& scratch, const Launch& launch) {
  const FoldProblem problem = attention_problem(x);
  const FoldGradients wanted{.grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v};
  const auto with = [&](const auto& scores) {
    fold_backward<E, Tile>(LogSumExp<Bits>{}, scores, problem, wanted, scratch.residuals, scratch.marks,
                           launch);
  };
  if (problem.score.softcap == 0) return with(ScaledScores<Bits>(problem.score, kLog2E));
  with(SoftcappedScores<Bits>(problem.score, kLog2E));
}

}  // namespace

std::int64_t attention_backward_scratch(const AttentionBackward& x) { return Scratch(x, nullptr).size; }

void attention_backward(const AttentionBackward& x, const Launch& launch) {
  const Scratch scratch(x, static_cast<float*>(x.scratch.data));
  const float scale = static_cast<float>(x.options.scale);
  const FoldProblem problem = attention_problem(x);
  with_element(x.q.dtype, [&](auto element) {
    using E = decltype(element);
    prepare_rows<E>({x.grad_out, x.out, x.lse, x.grad_lse, scale, x.k.size[1], !problem.range.all()},
                    scratch.residuals, scratch.marks, launch);
    if (std::max(x.q.size[3], x.v.size[3]) <= 64) return run<E, Width64>(x, scratch, launch);
    run<E, Width128>(x, scratch, launch);
  });
  const FoldGradients wanted{.grad_out = x.grad_out, .d_a = x.d_q, .d_b = x.d_k, .d_payload = x.d_v};
  repair_backward(LogSumExp<float>{}, problem,
                  RepairedRows{static_cast<float*>(x.lse.data), static_cast<float*>(x.lse_low.data),
                               scratch.residuals, x.q.size[2], 1 / scale},
                  wanted, scratch.marks, launch);
}

}  // namespace monoidreduce::cuda::sm90
