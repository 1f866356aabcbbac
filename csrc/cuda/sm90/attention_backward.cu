#include "../attention_passes.cuh"
#include "../tensor_cores.h"
#include "monoidreduce/kernel/fold_backward_sm90.cuh"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using Width64 = BackwardTile<64, 128>;
using Width128 = BackwardTile<128, 64>;

}  // namespace

void attention_backward(const AttentionBackward& x, const Launch& launch) {
  const std::int64_t width = std::max(x.q.size[3], x.v.size[3]);
  attention_backward_passes(
      x, launch,
      [&](auto element, const auto& scores, const auto& problem, const auto& wanted,
          const BackwardScratch& scratch) {
        using E = decltype(element);
        const LogSumExp<Bits> m;
        const auto& [residuals, marks, size] = scratch;
        if (width <= 64)
          return fold_backward<E, Width64>(m, scores, problem, wanted, residuals, marks, launch);
        fold_backward<E, Width128>(m, scores, problem, wanted, residuals, marks, launch);
      });
}

}  // namespace monoidreduce::cuda::sm90
