#include <string_view>

#include "monoidreduce/error.h"
#include "monoidreduce/operators.h"
#include "plan.h"

namespace monoidreduce {
namespace {

std::string text(const Reason& r) {
  switch (r.why) {
    case Why::kNothing:
      return "";
    case Why::kNamedSimt:
      return "MONOIDREDUCE_CUDA_TIER=simt";
    case Why::kNamedSm80:
      return "MONOIDREDUCE_CUDA_TIER=sm80";
    case Why::kFloat32:
      return "the inputs are float32, not multiplied in tf32";
    case Why::kFloat64:
      return "the inputs are float64";
    case Why::kEmpty:
      return "there are no rows or no columns";
    case Why::kScale:
      return message("the scale is ", r.number, ", not positive");
    case Why::kTooMany:
      return "there are 2^30 rows, columns or tiles of them, or more";
    case Why::kTf32:
      return "the inputs are float32, multiplied in tf32";
    case Why::kNotBuilt:
      return "this build has no code for sm_90a";
    case Why::kGpu:
      return message("the GPU is sm_", r.first, r.second, ", not sm_", r.third, "0");
    case Why::kSharedBias:
      return "the bias of scores is the same for all columns";
    case Why::kWideBias:
      return "there is a bias of scores, and a width is more than 128";
    case Why::kWidth0:
      return "a width is 0";
    case Why::kWidth:
      return message("a width is ", r.first, ", more than ", r.second);
    case Why::kOnlyLogSumExp:
      return "only the log-sum-exp has a gradient";
    case Why::kBiasInOrder:
      return "scores share a bias whose gradient is wanted, and the deterministic mode is asked for";
    case Why::kInOrder:
      return "the deterministic mode is asked for";
    case Why::kTorchInOrder:
      return "torch's matrix products are deterministic only with CUBLAS_WORKSPACE_CONFIG=:4096:8";
    case Why::kWorkspace:
      return message("the workspace of ", r.first, " bytes holds no tile a row");
    case Why::kHiddenSpace:
      return message("the workspace of ", r.first, " bytes holds no tile of hidden values");
    case Why::kIdleByRows:
      return message(r.first, " rows are ", r.second, " blocks for ", r.third, " multiprocessors");
    case Why::kIdleByUnits:
      return message(r.first, " hidden units are ", r.second, " blocks for ", r.third, " multiprocessors");
    case Why::kClassWeights:
      return "label smoothing has weights of classes";
    case Why::kTopOfLogits:
      return "top1 is of logits with a bias or a softcap";
    case Why::kWideModified:
      return "functions modify scores, and a width is more than 128";
    case Why::kBlocksInOrder:
      return "blocks are skipped, and the deterministic mode is asked for";
    case Why::kUserMonoid:
      return "a user's monoid in C++ has no kernels with them";
  }
  return "";
}

std::string text(const Choice& choice) {
  if (choice.both) return (choice.family == Family::kSimt ? "not sm90 or sm80: " : "") + text(choice.both);
  switch (choice.family) {
    case Family::kSimt:
      return "not sm90: " + text(choice.sm90) + "; not sm80: " + text(choice.sm80);
    case Family::kSm80:
      return "tensor cores, through mma.sync; not sm90: " + text(choice.sm90);
    case Family::kSm90:
      return "tensor cores, through sm_90a";
  }
  return "";
}

std::string few_rows(const Packing& packing, bool attention) {
  const std::string split = packing.splits > 1 ? message("in ", packing.splits, " splits") : "not split";
  const std::string of = attention ? message(" of ", packing.heads, " heads, columns ") : ", hidden units ";
  return message("; few rows: tiles of ", packing.rows, " rows", of, split);
}

// Of attention's gradients.
std::string alone(const GradientSet& computed) {
  std::string which;
  const auto add = [&](bool there, const char* name) {
    if (there) which += (which.empty() ? "" : " and ") + std::string(name);
  };
  add(computed.rows, "q"), add(computed.columns, "k"), add(computed.payload, "v");
  const bool all = computed.rows && computed.columns && computed.payload;
  return all ? "" : "; the gradient" + std::string(which.size() > 1 ? "s" : "") + " of " + which + " alone";
}

std::string padding(std::int64_t size, const char* of, const char* behind) {
  return size % 8 == 0 ? "" : message("; of ", of, padded_size(size), behind, ", padded from ", size);
}

}  // namespace

std::string text(const Plan& plan) {
  const bool simt = plan.choice.family == Family::kSimt, tried_parts = plan.whole.both || plan.whole.sm90;
  if (simt && tried_parts) return text(plan.whole) + "; in parts: " + text(plan.choice);
  if (simt) return text(plan.choice) + (plan.narrow ? "; narrow: threads own rows" : "");
  const bool mlp = std::string_view(plan.call).starts_with("mlp");
  std::string all = text(plan.choice);
  if (plan.packing.heads > 0) all += few_rows(plan.packing, !mlp);
  if (plan.narrow && std::string_view(plan.call) == kDescription<LogSumExpForward>.name)
    all += "; narrow: folds the mean of b too";
  else if (plan.narrow)
    all += "; narrow: gradients are folds, and no local gradients are held";
  if (std::string_view(plan.call) == kDescription<AttentionBackward>.name) all += alone(plan.computed);
  if (plan.sharing.in_parts > 0) all += message("; ", plan.sharing.in_parts, " tiles of columns in parts");
  if (plan.part.rows > 0)
    all += message(", in parts of ", plan.part.rows, " rows and ", plan.part.columns,
                   " hidden units, by no kernel that holds none: ", text(plan.whole));
  all += padding(plan.given[0], "width ", "") + padding(plan.given[1], "width ", "");
  return mlp ? all + padding(plan.given[2], "", " hidden units") : all;
}

}  // namespace monoidreduce
