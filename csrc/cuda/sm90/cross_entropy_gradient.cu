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

using Tile = ContractionTile<256, 4>;

// Rows, for the classes from first_class on.
struct CrossEntropyGradientRows {
  CrossEntropyRows<float> rows;
  std::int64_t first_class;
  int classes;
  using Upstream = CrossEntropy<Bits>::Upstream;

  __device__ int label(std::int64_t row) const {
    const std::int64_t label = rows.label(row) - first_class;
    return 0 <= label && label < classes ? static_cast<int>(label) : -1;
  }
  // Without a part in the loss a row weighs nothing, whatever its log-sum-exp.
  __device__ CrossEntropy<Bits>::Output product(std::int64_t row) const {
    const LogNumber<Bits> lse =
        rows.active(row) ? bits(rows.product(row).lse) : LogNumber<Bits>{infinity<Bits>(), 0.f};
    return {lse, 0.f, 0.f};
  }
  __device__ bool far(const CrossEntropy<Bits>::Output& p) const { return is_far(p.lse); }
  __device__ Upstream upstream(std::int64_t row, Bits unit) const {
    if (!rows.active(row)) return {0.f, 0.f, 0.f};
    const auto u = rows.upstream(row);
    return {Bits(u.lse) * unit, Bits(u.target) * unit, Bits(u.sum) * unit};
  }
};

struct LogSumExpGradientRows {
  LogSumExpRows<float> rows;
  __device__ int label(std::int64_t) const { return -1; }
  __device__ LogNumber<Bits> product(std::int64_t row) const { return bits(rows.product(row)); }
  __device__ bool far(LogNumber<Bits> lse) const { return is_far(lse); }
  __device__ Bits upstream(std::int64_t row, Bits unit) const { return Bits(rows.upstream(row)) * unit; }
};

}  // namespace

void cross_entropy_local_gradient(const CrossEntropyLocalGradient& x, const Launch& launch) {
  const FoldProblem problem = cross_entropy_problem(x);
  const CrossEntropyGradientRows rows{
      {.target = static_cast<const std::int64_t*>(x.target.data),
       .target_stride = x.target.stride[0],
       .ignore_index = x.options.ignore_index,
       .rule = {static_cast<float>(x.options.label_smoothing), static_cast<float>(x.options.z_loss),
                static_cast<float>(x.classes)},
       .loss = nullptr,
       .lse = static_cast<float*>(x.lse.data),
       .lse_low = static_cast<float*>(x.lse_low.data),
       .grad_loss = {static_cast<float*>(x.grad_loss.data), x.grad_loss.stride[0]},
       .grad_lse = {static_cast<float*>(x.grad_lse.data), x.grad_lse.stride[0]}},
      x.first_class,
      static_cast<int>(problem.columns())};
  with_element(x.x.dtype, [&](auto element) {
    using E = decltype(element);
    const auto run = [&](const auto& scores) {
      local_gradient<E, Tile>(CrossEntropy<Bits>{}, scores, problem, rows, {as_rows(x.out)}, x.sums, launch);
    };
    if (x.bias.present() || x.options.softcap != 0)
      return run(LogitScores<Bits, E>(problem.score, kLog2E, x.bias, problem.columns()));
    run(ScaledScores<Bits>(problem.score, kLog2E));
  });
}

void logsumexp_local_gradient(const LogSumExpLocalGradient& x, const Launch& launch) {
  const FoldProblem problem = logsumexp_problem(x);
  const LogSumExpGradientRows rows{{static_cast<float*>(x.lse.data),
                                    static_cast<float*>(x.lse_low.data),
                                    {static_cast<float*>(x.grad_lse.data), x.grad_lse.stride[0]}}};
  with_element(x.a.dtype, [&](auto element) {
    local_gradient<decltype(element), Tile>(LogSumExp<Bits>{}, ScaledScores<Bits>(problem.score, kLog2E),
                                            problem, rows, {as_rows(x.out)}, {}, launch);
  });
}

}  // namespace monoidreduce::cuda::sm90
