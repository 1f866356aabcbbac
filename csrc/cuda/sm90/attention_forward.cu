#include "attention.h"
#include "element.h"
#include "monoidreduce/block/fast_real.cuh"
#include "monoidreduce/block/fragment_scores.cuh"
#include "monoidreduce/kernel/fold_forward_sm90.cuh"
#include "monoidreduce/kernel/repair.cuh"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/problems.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

// A row that is to be computed again has NaN for its log-sum-exp until then. The low word is 0: weights of 16 bits do
// not need it.
struct AttentionRows {
  float *lse, *lse_low;  // [rows], natural logarithm
  __device__ void store(std::int64_t row, LogNumber<Bits> p, bool right) const {
    lse[row] = right ? p.high.x * float(kLn2) : NAN;
    lse_low[row] = 0.f;
  }
  __device__ float output(float sum, int) const { return sum; }
};
struct RepairedRows {
  float *lse, *lse_low;
  __device__ bool marked(std::int64_t row) const { return isnan(lse[row]); }
  __device__ void store(std::int64_t row, LogNumber<float> p) const {
    lse[row] = p.high, lse_low[row] = p.low;
  }
};

// TFLOP/s on an H200, 16k tokens, full: 128 columns at width 64 with 2 consumers 430, with 3 482; width 128 with 128
// columns 578, 160: 587, 176: 612.
using Width64 = ForwardTile<64, 64, 128, 3, 2>;
using Width128 = ForwardTile<128, 128, 176, 2, 2>;
using Width256 = ForwardTile<256, 256, 80, 2, 2>;

template <class E, class Tile>
void run(const AttentionForward& x, const Launch& launch) {
  const FoldProblem problem = attention_problem(x);
  const AttentionRows rows{static_cast<float*>(x.lse.data), static_cast<float*>(x.lse_low.data)};
  const auto with = [&](const auto& scores) {
    fold_forward<E, Tile>(LogSumExp<Bits>{}, scores, problem, rows, x.out, x.counter, launch);
  };
  if (problem.score.softcap == 0) return with(ScaledScores<Bits>(problem.score, kLog2E));
  with(SoftcappedScores<Bits>(problem.score, kLog2E));
}

}  // namespace

void attention_forward(const AttentionForward& x, const Launch& launch) {
  const std::int64_t width = std::max(x.q.size[3], x.v.size[3]);
  with_element(x.q.dtype, [&](auto element) {
    using E = decltype(element);
    if (width <= 64) return run<E, Width64>(x, launch);
    if (width <= 128) return run<E, Width128>(x, launch);
    run<E, Width256>(x, launch);
  });
  repair_forward(LogSumExp<float>{}, attention_problem(x),
                 RepairedRows{static_cast<float*>(x.lse.data), static_cast<float*>(x.lse_low.data)}, x.out,
                 launch);
}

}  // namespace monoidreduce::cuda::sm90
