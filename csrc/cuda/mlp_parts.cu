#include <algorithm>

#include "mlp.h"
#include "operator.h"
#include "tensor_cores.h"

namespace monoidreduce::cuda {
namespace {

// How many lines of a matrix fit into so many bytes: whole tiles, all times equally many; 0 where not one does.
std::int64_t lines_at_once(std::int64_t bytes, std::int64_t line_bytes, std::int64_t lines,
                           std::int64_t tile) {
  const auto divide_up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t fitting = bytes / (line_bytes * tile), tiles = divide_up(lines, tile);
  return fitting == 0 ? 0 : divide_up(tiles, divide_up(tiles, fitting)) * tile;
}

// All lines, or as many whole tiles of them as fit.
std::int64_t fitting(std::int64_t bytes, std::int64_t line_bytes, std::int64_t lines, std::int64_t tile) {
  return lines * line_bytes <= bytes ? lines : std::min(lines, lines_at_once(bytes, line_bytes, lines, tile));
}

// The tier of a call that comes in such parts. fused: what keeps it from the kernels that store no hidden value.
Tier in_parts(const Tier& fused, const FoldProblem& p, TileSize part, std::int64_t workspace,
              const Launch& launch) {
  Tier tier = multiplied_tier(p, launch);
  if (tier.name != kSimt && part.rows * part.columns == 0)
    tier = not_tensor_cores(message("the workspace of ", workspace, " bytes holds no tile of hidden values"));
  if (tier.name == kSimt) return {kSimt, fused.reason + "; in parts: " + tier.reason};
  tier.reason += message(", in parts of ", part.rows, " rows and ", part.columns,
                         " hidden units, by no kernel that holds none: ", fused.reason);
  tier.part = part;
  return tier;
}

constexpr std::int64_t kTileRows = 256, kTileUnits = 192;

}  // namespace

Tier mlp_forward_parts(const Tier& fused, const FoldProblem& p, std::int64_t workspace,
                       const Launch& launch) {
  const std::int64_t of_row = p.columns() * item_size(p.a.dtype),
                     rows = fitting(workspace, of_row, p.rows(), kTileRows);
  return in_parts(fused, p, {rows, p.columns()}, workspace, launch);
}

Tier mlp_backward_parts(const Tier& fused, const FoldProblem& p, std::int64_t workspace,
                        const Launch& launch) {
  // A hidden value, and the derivative by it.
  const std::int64_t bytes = 2 * item_size(p.a.dtype),
                     rows = fitting(workspace, p.columns() * bytes, p.rows(), kTileRows),
                     units = fitting(workspace, p.rows() * bytes, p.columns(), kTileUnits);
  const bool fewer_rows = p.rows() * p.width() <= p.columns() * (p.width() + p.payload_width());
  if (rows == 0 || (fewer_rows && units > 0)) return in_parts(fused, p, {p.rows(), units}, workspace, launch);
  return in_parts(fused, p, {rows, p.columns()}, workspace, launch);
}

void mlp_hidden(const MlpHidden& x, const Launch& launch) {
  const Tier tier = contraction_tier(mlp_hidden_problem(x));
  require(tier.name != kSimt, "x: expected a call on the tier sm80 or sm90, got ", tier.reason);
  if (tier.name == kSm80) sm80::mlp_hidden(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::mlp_hidden(x, launch);
  }
  count_tier("mlp_forward", tier, x.x.dtype);
}

void mlp_local_gradient(const MlpLocalGradient& x, const Launch& launch) {
  const Tier tier = contraction_tier(mlp_gradient_problem(x));
  require(tier.name != kSimt, "x: expected a call on the tier sm80 or sm90, got ", tier.reason);
  if (tier.name == kSm80) sm80::mlp_local_gradient(x, launch);
  if constexpr (kWithSm90) {
    if (tier.name == kSm90) sm90::mlp_local_gradient(x, launch);
  }
  count_tier("mlp_backward", tier, x.x.dtype);
}

}  // namespace monoidreduce::cuda
