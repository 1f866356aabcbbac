// What the tensor-core tiers share for linear distillation: the fold, and the local gradients (dlogits), by
// contraction tiles.
#pragma once

#include "element.h"
#include "monoidreduce/device/block/fragment_scores.cuh"
#include "monoidreduce/launch/fold_epilogue.cuh"
#include "monoidreduce/launch/gradient_epilogue.cuh"
#include "monoidreduce/ops/distillation.h"
#include "monoidreduce/rows.h"
#include "natural.cuh"

namespace monoidreduce::cuda {

// The row policy of the forward fold (StateRows).
struct DistillationResults {
  DistillationRows<float> rows;
  NamedDistillation<double> monoid;
  using State = DistillationState<Bits>;
  __device__ std::int64_t label(std::int64_t) const { return -1; }
  // In double: a loss is a difference of logarithms of masses, and Bits would round each of them.
  __device__ void store(std::int64_t row, const State& s) const {
    const auto p = monoid.project({natural(s.p), {natural(s.q.softmax), natural(s.q.sum)}});
    rows.store(row, {rounded<float>(p.p_lse), rounded<float>(p.q_lse), rounded<float>(p.centre),
                     static_cast<float>(p.loss)});
  }
  __device__ void skip(std::int64_t row) const {
    rows.loss[row] = 0.f;
    for (int n = 0; n < 6; ++n) rows.stats[n * rows.rows + row] = 0.f;
  }
};

template <class Call>
DistillationRows<float> rows_of(const Call& x) {
  DistillationRows<float> rows{.mask = static_cast<const bool*>(x.mask.data),
                               .mask_stride = x.mask.stride[0],
                               .rows = x.x.size[0],
                               .loss = nullptr,
                               .stats = static_cast<float*>(x.stats.data),
                               .grad_loss = {}};
  if constexpr (requires { x.loss; }) rows.loss = static_cast<float*>(x.loss.data);
  return rows;
}

// Calls run(E{}, monoid, scores, results), which must fold with a kernel for the tile.
template <class Tile, class Run>
void distillation_forward_pass(const DistillationForward& x, Run run) {
  const ScaledScores<Bits> scores(distillation_problem(x).score, kLog2E);
  with_element_of<Tile>(x.x.dtype, [&](auto element) {
    const NamedDistillation<Bits> monoid{{}, x.options.loss};
    run(element, monoid, scores, DistillationResults{rows_of(x), {{}, x.options.loss}});
  });
}

// The row policy of the local gradients (LocalGradientRows). kExact: gradients are float32, which shows the low word of the
// centre. Those in 16 bits do not, and it would take registers.
template <bool kExact>
struct DistillationGradientRows {
  DistillationRows<float> rows;
  using Output = DistillationOutput<Bits>;

  __device__ int label(std::int64_t) const { return -1; }
  // A row that is not active has weights of 0, whatever its statistics. kNothing is finite, because a
  // gradient has differences of these numbers, and that of two infinities is NaN.
  __device__ Output product(std::int64_t row) const {
    constexpr LogNumber<Bits> kNothing{kLargest<float>, 0.f};
    if (!rows.active(row)) return {kNothing, kNothing, kNothing, 0.f};
    const auto p = rows.product(row);
    const auto centre = bits(p.centre);
    return {bits(p.p_lse), bits(p.q_lse), {centre.high, kExact ? centre.low : Bits(0.f)}, 0.f};
  }
  __device__ bool far(const Output& p) const { return is_large(p.p_lse) || is_large(p.q_lse); }
  __device__ Bits upstream(std::int64_t row, Bits unit) const {
    return rows.active(row) ? Bits(rows.upstream(row)) * unit : Bits(0.f);
  }
};

// In base 2, like the forward pass, which multiplies the scale and log2(e) into one factor. If only one pass
// did that, the factor's rounding would show in large scores.
template <class Tile>
void distillation_gradient_pass(const DistillationLocalGradient& x, const Launch& launch) {
  const FoldProblem problem = distillation_problem(x);
  with_element_of<Tile>(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    const DistillationGradientRows<Tile::kPlanes == 2> rows{
        {.mask = static_cast<const bool*>(x.mask.data),
         .mask_stride = x.mask.stride[0],
         .rows = x.x.size[0],
         .loss = nullptr,
         .stats = static_cast<float*>(x.stats.data),
         .grad_loss = {static_cast<float*>(x.grad_loss.data), x.grad_loss.stride[0]}}};
    const ScaledScores<Bits> scores(problem.score, kLog2E);
    // One kernel for each loss: with one for all, Hopper's local gradients of the reverse KL took 5 % longer.
    NamedDistillation<Bits>{{}, x.options.loss}.with_named([&](const auto& m) {
      const auto run = [&](const auto&... outs) {
        const auto epilogue = gradient_epilogue<E, Tile>(m, scores, problem, rows, {as_rows(outs)...}, {});
        contraction<E>(Tile{}, problem, epilogue, nullptr, "local_gradient", launch);
      };
      x.teacher_out.present() ? run(x.out, x.teacher_out) : run(x.out);
    });
  });
}

}  // namespace monoidreduce::cuda
