#include "linear_losses.h"
#include "monoidreduce/error.h"
#include "monoidreduce/ops/rows.h"
#include "tier.h"

namespace monoidreduce::cuda {
namespace {

void require_sm90(const FoldProblem& p) {
  const Tier tier = contraction_tier(p);
  require(tier.name == kSm90, "a: expected a product on the tier sm90, got ", tier.name, ", because ",
          tier.reason);
}

}  // namespace

void rows_product(const RowsProduct& x, const Launch& launch) {
  require_sm90(rows_product_problem(x));
  if constexpr (kWithSm90) sm90::rows_product(x, launch);
}

void columns_product(const ColumnsProduct& x, const Launch& launch) {
  require_sm90(columns_product_problem(x));
  if constexpr (kWithSm90) sm90::columns_product(x, launch);
}

}  // namespace monoidreduce::cuda
