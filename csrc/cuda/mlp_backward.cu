#include "mlp.h"

#include <algorithm>

#include "monoidreduce/launch/fold_backward_simt.cuh"
#include "monoidreduce/monoids/sum.h"
#include "monoidreduce/ops/mlp.h"
#include "operator.h"
#include "tensor_cores.h"
#include "tier.h"

namespace monoidreduce::cuda {
namespace {

// Of the kernels that store no hidden value.
Tier fused_tier(const MlpBackward& x, const Launch& launch) {
  const FoldProblem problem = mlp_problem(x);
  Tier tier = fastest_tier(
      problem, {.sm80 = widest_sm80_backward(problem), .sm90 = 256}, launch,
      {.both = mlp_obstacle(x), .sm80 = launch.deterministic ? "the deterministic mode is asked for" : ""});
  tier.adds_rows = tier.name != kSm90 || (sm90::gradients_at_once(problem) && !launch.deterministic);
  return tier;
}

// What keeps the kernels that store none from being the faster ones: so few blocks that most multiprocessors would be idle.
//
// Of many rows, those of hidden units. (H100, 16384 rows, bfloat16, as they are and in parts: width 128, 1024 units, 0.77 and
// 0.12 ms, 4096 units, 0.76 and 0.39; 64, 16384 units, 0.59 and 1.4.) Kernels of floats share the rows among blocks instead. Of
// many hidden units, where rows have a pass of their own on Hopper, those of rows (16384 units of width 256: 128 rows take 0.57 ms
// in one block and 0.06 in parts; parts of 1024 rows 0.14, of 4096, whose blocks would run side by side, 0.78. Up to width 128
// they have one in the deterministic mode, which was not timed).
std::string idle(const MlpBackward& x, const Tier& fused) {
  constexpr int kUnits = 128, kManyRows = 8192, kRows = 128, kManyUnits = 4096, kShare = 3, kShareOfRows = 5;
  const std::int64_t units = x.w1.size[0], blocks = (units + kUnits - 1) / kUnits;
  const std::int64_t rows = x.x.size[0], row_blocks = (rows + kRows - 1) / kRows;
  const int all = multiprocessors(x.x.cuda_device);
  if (!fused.adds_rows && units >= kManyUnits && row_blocks * kShareOfRows <= all)
    return message(rows, " rows are ", row_blocks, " blocks for ", all, " multiprocessors");
  if (x.x.dtype == DType::kFloat32 || rows < kManyRows || blocks * kShare > all) return "";
  return message(units, " hidden units are ", blocks, " blocks for ", all, " multiprocessors");
}

// Are parts so large that launches take no longer than products. Where parts are of units, products of width 128 that are
// added to the rows' gradient took 5 ms in all, others 1 to 2.
bool large(const TileSize& part, const FoldProblem& p) {
  constexpr std::int64_t kValues = 1 << 22;
  return part.columns == p.columns() && part.rows * part.columns >= std::min(p.rows() * p.columns(), kValues);
}

// Of operands as they are.
Tier tier_of(const MlpBackward& x, const Launch& launch) {
  const FoldProblem problem = mlp_problem(x);
  const Tier fused = fused_tier(x, launch);
  if (fused.name == kSimt) return mlp_backward_parts(fused, problem, x.workspace, launch);
  const std::string obstacle = idle(x, fused);
  if (obstacle.empty()) return fused;
  const Tier parts = mlp_backward_parts({kSimt, obstacle}, problem, x.workspace, launch);
  return parts.name != kSimt && large(parts.part, problem) ? parts : fused;
}

}  // namespace

Tier mlp_backward_tier(const MlpBackward& x, const Launch& launch) {
  return with_padding(tier_of(padded(x), launch), x);
}

void mlp_backward(const MlpBackward& x, const Launch& launch) {
  const Tier tier = fused_tier(x, launch);
  const bool simt = tier.name == kSimt;
  for (const TensorView* gradient : {&x.d_w1, &x.d_w2}) {
    const DType expected = simt ? accumulation(x.x.dtype) : x.x.dtype;
    require(!gradient->present() || gradient->dtype == expected, "dw1, dw2: expected ", name(expected),
            ", as mlp_backward_tier says, got ", name(gradient->dtype));
  }
  const DType of_rows = tier.adds_rows ? accumulation(x.x.dtype) : x.x.dtype;
  require(!x.d_x.present() || x.d_x.dtype == of_rows, "dx: expected ", name(of_rows),
          ", as mlp_backward_tier says, got ", name(x.d_x.dtype));
  if (tier.name == kSm80) sm80::mlp_backward(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::mlp_backward(x, launch);
  }
  if (!simt) return count_tier("mlp_backward", tier, x.x.dtype, launch.deterministic);
  with_accumulation(x.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FoldGradients wanted{.grad_out = as_rows(x.grad_out),
                               .d_a = as_rows(x.d_x),
                               .d_b = as_rows(x.d_w1),
                               .d_payload = as_rows(transposed(x.d_w2)),
                               .d_bias = as_column_bias(x.d_bias1, x.x.size[0])};
    fold_backward<true>(NamedSum<T>{{}, x.activation}, mlp_problem(x), SumRows<T>{}, wanted, launch);
  });
  count_simt("mlp_backward", x.x.dtype, launch.deterministic);
}

}  // namespace monoidreduce::cuda
