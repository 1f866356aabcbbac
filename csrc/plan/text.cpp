#include <cmath>
#include <string>
#include <string_view>

#include "monoidreduce/error.h"
#include "monoidreduce/operators.h"
#include "plan.h"

namespace monoidreduce {
namespace {

std::string text(const Reason& r) {
  std::string_view left = r.text ? r.text : "";
  std::string all;
  for (const double n : r.numbers) {
    const std::size_t place = left.find("{}");
    if (place == left.npos) break;
    const bool whole = std::abs(n) < 0x1p53 && n == std::trunc(n);
    all += left.substr(0, place);
    all += whole ? message(static_cast<std::int64_t>(n)) : message(n);
    left.remove_prefix(place + 2);
  }
  return all + std::string(left);
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
    case Family::kPlanes:
      return "tensor cores, through sm_90a, float32 as planes of float16";
  }
  return "";
}

std::string few_rows(const Packing& packing, bool mlp) {
  const std::string split = packing.splits > 1 ? message("in ", packing.splits, " splits") : "not split";
  const std::string heads = packing.heads > 1 ? message(" of ", packing.heads, " heads") : "";
  return message("; few rows: tiles of ", packing.rows, " rows", heads,
                 mlp ? ", hidden units " : ", columns ", split);
}

// Names the gradients of attention that are computed, unless all are.
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
  const bool simt = plan.choice.family == Family::kSimt;
  if (simt && plan.whole) return text(*plan.whole) + "; in parts: " + text(plan.choice);
  if (simt)
    return text(plan.choice) + (plan.owned_rows ? "; narrow: threads own rows" : "") +
           (plan.packing ? message("; few tiles of ", plan.packing->rows, " rows: columns in ",
                                   plan.packing->splits, " splits")
                         : "");
  const bool mlp = std::string_view(plan.call).starts_with("mlp");
  std::string all = text(plan.choice);
  if (plan.owned_rows) all += "; narrow: gradients are summed on chip, and no local gradients are held";
  if (plan.packing) all += few_rows(*plan.packing, mlp);
  if (plan.narrow && std::string_view(plan.call) == kDescription<LogSumExpForward>.name)
    all += "; narrow: folds the mean of b too";
  else if (plan.narrow)
    all += "; narrow: gradients are folds, and no local gradients are held";
  if (std::string_view(plan.call).ends_with("attention_backward")) all += alone(plan.computed);
  if (plan.sharing.split_jobs > 0)
    all += message("; ", plan.sharing.split_jobs, " tiles of columns in parts");
  if (plan.sharing.parts.count() > 1)
    all += message("; each tile of columns in ", plan.sharing.parts.heads, " x ", plan.sharing.parts.rows,
                   " parts of heads and rows");
  if (plan.part)
    all += message(", in parts of ", plan.part->rows, " rows and ", plan.part->columns,
                   " hidden units, by no kernel that holds none: ", text(*plan.whole));
  const UnpaddedSizes& sizes = plan.unpadded;
  all += padding(sizes.width, "width ", "") + padding(sizes.other_width, "width ", "");
  return mlp ? all + padding(sizes.columns, "", " hidden units") : all;
}

}  // namespace monoidreduce
