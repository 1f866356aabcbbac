// Tests what the host code launches, on GPUs that a fake CUDA runtime simulates (fake_cudart.h): properties of every call, and
// the kernels and grids of some.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "launches/calls.h"

namespace {

using namespace monoidreduce::launches;
using monoidreduce::test::Checks;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A kernel's name without the namespaces that all of them have.
std::string short_name(std::string name) {
  for (const std::string part : {"void ", "monoidreduce::", "cuda::", "(anonymous namespace)::"}) {
    for (std::size_t at; (at = name.find(part)) != std::string::npos;) name.erase(at, part.size());
  }
  return name;
}

// Whether the two blocks of a cluster share the width of operands in planes.
bool shares_width(const std::string& kernel) {
  return contains(kernel, "sm90::PlanesTile<128, 2, 1, 2, 8>") ||
         (contains(kernel, "sm90::PlanesPassTile<") && contains(kernel, "128, 1, false, 2, "));
}

// Whether a kernel is persistent, with one block on each SM.
bool stays(const std::string& kernel, const std::string& call) {
  // Clusters have no common counter: if jobs differ in length, each has a cluster of its own.
  if (shares_width(kernel) && contains(call, "causal")) return false;
  return contains(kernel, "contraction_kernel<") || contains(kernel, "sm90::fold_forward_kernel<") ||
         contains(kernel, "sm90::fold_forward_planes_kernel<") ||
         contains(kernel, "sm90::fold_few_rows_kernel<") ||
         (contains(kernel, "sm90::fold_backward_kernel<") && contains(call, "attention"));
}

// ---- Every call

void check_event(Checks& checks, const Machine& machine, const Call& call, const Event& event) {
  const Device& device = kDevices[machine.device];
  CHECK(checks, event.device == machine.device, event.name, event.device);
  CHECK(checks, reinterpret_cast<std::uintptr_t>(event.stream) == kStream, event.name);
  const std::string kernel = short_name(event.name), tier = call.tier.substr(0, 4);
  if (kernel == "cudaMemsetAsync") return;
  CHECK(checks, event.block[0] % 32 == 0 && event.block[0] <= 1024, kernel, event.block[0]);
  CHECK(checks, event.shared_bytes <= std::size_t(device.shared_bytes), kernel, event.shared_bytes);
  if (stays(kernel, call.name))
    CHECK(checks, event.grid[0] <= unsigned(device.multiprocessors), kernel, event.grid[0]);
  // These kernels run in 2-CTA clusters.
  if (contains(kernel, "sm90::contraction_kernel<") || shares_width(kernel))
    CHECK(checks, event.grid[0] % 2 == 0, kernel, event.grid[0]);
  for (const char* const other : {"sm80", "sm90", "simt"}) {
    const std::string space = std::string(other) + "::";
    if (tier == "sm80" || tier == "sm90" || tier == "simt")
      CHECK(checks, tier == other || !contains(kernel, space), kernel, call.tier);
  }
  for (const auto& [dtype, foreign] : {std::pair{" bfloat16", "__half"}, {" float16", "__nv_bfloat16"}}) {
    // Saved weights are float16 for both 16-bit types.
    const bool saves = contains(kernel, "KeptWeights<") && std::string(foreign) == "__half";
    if (contains(call.name, dtype) && !contains(call.name, "scale_rows") && !saves)
      CHECK(checks, !contains(kernel, foreign), kernel);
  }
}

void check_call(Checks& checks, const Machine& machine, const Call& call) {
  checks.section(machine.name, call.name);
  CHECK(checks, call.error.empty(), call.error);
  CHECK(checks, !call.events.empty() || contains(call.name, " empty"), call.tier);
  const bool hopper = kDevices[machine.device].major == 9, slower = machine.tier != std::string();
  CHECK(checks, (hopper && !slower) || call.tier.substr(0, 4) != "sm90", call.tier);
  CHECK(checks, machine.tier != std::string("simt") || call.tier.substr(0, 4) != "sm80", call.tier);
  for (const Event& event : call.events) check_event(checks, machine, call, event);
}

// ---- Some calls

struct Launched {
  std::string kernel;  // the beginning of its name
  unsigned grid = 0, threads = 0;
  std::vector<std::string> parts = {};  // what follows in its name, in this order
};
struct Expected {
  std::string machine, call, tier;
  std::vector<Launched> launches;
};
const Launched kMemset{"cudaMemsetAsync"};

// Expected launches. Attention has a batch of 2, 8 query heads and 2 key heads, 1024 queries and 1024 keys, unless the name
// says otherwise. An H100 has 132 SMs, an A100 108, an RTX 5090 170 and an RTX 3060 28.
const std::vector<Expected> kExpected = {
    // Tiles have 192 queries at width 64, and 128 at larger widths. Blocks with more than one job take them from a counter.
    {"H100",
     "attention_forward bfloat16 width 64",
     "sm90",
     {{"sm90::fold_forward_kernel<__nv_bfloat16, sm90::ForwardTile<64,", 16 * 6, 512}}},
    {"H100",
     "attention_forward float16 width 256",
     "sm90",
     {{"sm90::fold_forward_kernel<__half, sm90::ForwardTile<256,", 16 * 8, 384}}},
    {"H100",
     "attention_forward bfloat16 width 128 causal",
     "sm90",
     {{"sm90::fold_forward_kernel<__nv_bfloat16, sm90::ForwardTile<128,", 16 * 8, 384},
      {"repair_forward_kernel<", 16 * 8 * 128 / 256, 256}}},
    {"H100",
     "attention_forward bfloat16 width 128 many heads",
     "sm90",
     {kMemset,
      {"sm90::fold_forward_kernel<__nv_bfloat16, sm90::ForwardTile<128,", 132, 384},
      {"repair_forward_kernel<", 4 * 132, 256}}},
    // 8 x 8 key heads, each in two splits; then 8 x 32 rows to combine.
    {"H100",
     "attention_forward bfloat16 width 128 one row",
     "sm90",
     {{"sm90::fold_few_rows_kernel<__nv_bfloat16, sm90::ForwardTile<128,", 2 * 64, 256},
      {"combine_splits_kernel<__nv_bfloat16,", 256, 128}}},
    {"H100, sm80",
     "attention_forward bfloat16 width 64",
     "sm80",
     {{"sm80::fold_forward_kernel<__nv_bfloat16, sm80::ForwardTile<64,", 16 * 8, 128}}},
    {"H100, simt",
     "attention_forward bfloat16 width 64",
     "simt",
     {{"simt::fold_forward<true,", 16 * 16, 256}}},
    {"A100",
     "attention_forward bfloat16 width 128 causal",
     "sm80",
     {{"sm80::fold_forward_kernel<__nv_bfloat16, sm80::ForwardTile<128,", 16 * 8, 128},
      {"repair_forward_kernel<", 16 * 8 * 128 / 256, 256}}},
    {"A100",
     "attention_forward float32 width 128 tf32",
     "sm80",
     {{"sm80::fold_forward_kernel<float, sm80::ForwardTile<128,", 16 * 8, 128}}},
    {"A100", "attention_forward float32 width 128", "simt", {{"simt::fold_forward<true,", 16 * 16, 256}}},
    {"H100", "attention_forward bfloat16 width 320", "simt", {{"simt::fold_forward<true,", 3 * 256, 256}}},
    {"H100", "attention_forward empty", "simt", {}},
    // In planes: a line of 128 numbers is split by a warp, one of 64 by half a warp. Tiles have 128 queries or keys; of 64
    // numbers, 192 queries in forward.
    {"H100",
     "attention_forward float32 planes width 64 mask",
     "plan",
     {{"split_heads_kernel<64>", 16 * 64, 256},
      {"split_heads_kernel<64>", 4 * 64, 256},
      {"split_heads_kernel<64>", 4 * 64, 256},
      {"sm90::fold_forward_planes_kernel<sm90::PlanesTile<64, 3, 4, 1, 1>, LogSumExp<",
       16 * 6,
       512,
       {"MemoryBiasedScores<", "bool, (Softcap)1>"}},
      {"repair_forward_kernel<", 16 * 8 * 128 / 256, 256}}},
    // Of 256 numbers, two lines of 128, one for each block of a cluster.
    {"H100",
     "attention_forward float32 planes width 256",
     "plan",
     {{"split_heads_kernel<128>", 16 * 256, 256},
      {"split_heads_kernel<128>", 4 * 256, 256},
      {"split_heads_kernel<128>", 4 * 256, 256},
      {"sm90::fold_forward_planes_kernel<sm90::PlanesTile<128, 2, 1, 2, 8>, LogSumExp<", 132, 384},
      {"repair_forward_kernel<", 16 * 8 * 128 / 256, 256}}},
    {"H100",
     "attention_forward float32 planes width 256 causal",
     "plan",
     {kMemset,
      {"split_heads_kernel<128>", 16 * 256, 256},
      {"split_heads_kernel<128>", 4 * 256, 256},
      {"split_heads_kernel<128>", 4 * 256, 256},
      {"sm90::fold_forward_planes_kernel<sm90::PlanesTile<128, 2, 1, 2, 8>, LogSumExp<", 2 * 16 * 8, 384},
      {"repair_forward_kernel<", 16 * 8 * 128 / 256, 256}}},
    {"H100",
     "attention_forward float32 planes width 256 mask",
     "plan",
     {{"split_heads_kernel<128>", 16 * 256, 256},
      {"split_heads_kernel<128>", 4 * 256, 256},
      {"split_heads_kernel<128>", 4 * 256, 256},
      {"sm90::fold_forward_planes_kernel<sm90::PlanesTile<128, 2, 1, 2, 8>, LogSumExp<",
       132,
       384,
       {"MemoryBiasedScores<", "bool, (Softcap)1>"}},
      {"repair_forward_kernel<", 16 * 8 * 128 / 256, 256}}},
    {"H100",
     "attention_forward float32 planes width 320",
     "simt",
     {{"simt::fold_forward<true,", 3 * 256, 256}}},
    {"H100",
     "attention_forward float32 planes width 64 bias of rows",
     "simt",
     {{"simt::fold_forward<true,", 256, 256}}},

    // A block of prepare_rows takes 32 rows of width 64, or 16 rows of width 128.
    // 4 x 8 tiles of keys, each in 2 x 2 parts of heads and of rows.
    {"H100",
     "attention_backward bfloat16 width 128 causal",
     "sm90",
     {{"prepare_rows<__nv_bfloat16, 16>", 16 * 64, 256},
      {"sm90::fold_backward_kernel<__nv_bfloat16, sm90::BackwardTile<128, 64, false, (sm90::RowSums)0>",
       4 * 8 * 4, 384},
      {"repair_backward_kernel<", 16 * 16 / 8, 256}}},
    {"H100",
     "attention_backward bfloat16 width 128 deterministic",
     "sm90",
     {{"prepare_rows<__nv_bfloat16, 16>", 16 * 64, 256},
      {"sm90::fold_backward_kernel<__nv_bfloat16, sm90::BackwardTile<128, 64, false, (sm90::RowSums)1>",
       4 * 8, 384}}},
    {"H100",
     "attention_backward long",
     "sm90",
     {{"prepare_rows<__nv_bfloat16, 16>", 8 * 4096, 256},
      {"sm90::fold_backward_kernel<__nv_bfloat16, sm90::BackwardTile<128,", 132, 384}}},
    // One kernel for all gradients, with 16 x 8 blocks for that of the queries, and 4 x 8 each for those of keys and values.
    {"H100",
     "attention_backward bfloat16 width 256",
     "sm90",
     {{"prepare_rows<__nv_bfloat16, 32>", 16 * 128, 256},
      {"sm90::fold_backward_pass_kernel<__nv_bfloat16,",
       16 * 8 + 2 * 4 * 8,
       384,
       {"PassTile<(sm90::GradientOf)0, 256,", "PassTile<(sm90::GradientOf)1, 256,",
        "PassTile<(sm90::GradientOf)2, 256,"}}}},
    {"H100",
     "attention_backward bfloat16 width 256 without d_k",
     "sm90",
     {{"prepare_rows<__nv_bfloat16, 32>", 16 * 128, 256},
      {"sm90::fold_backward_pass_kernel<__nv_bfloat16,", 16 * 8 + 4 * 8, 384}}},
    // Tiles have 128 keys, or 64 on GPUs with less shared memory.
    {"A100",
     "attention_backward bfloat16 width 64",
     "sm80",
     {{"prepare_rows<__nv_bfloat16, 8>", 16 * 32, 256},
      {"sm80::fold_backward_kernel<__nv_bfloat16, sm80::BackwardTile<64, 128, 128,", 4 * 8, 256}}},
    {"RTX 5090",
     "attention_backward bfloat16 width 64",
     "sm80",
     {{"prepare_rows<__nv_bfloat16, 8>", 16 * 32, 256},
      {"sm80::fold_backward_kernel<__nv_bfloat16, sm80::BackwardTile<64, 64, 64,", 4 * 16, 128}}},
    // Two blocks run on each of 108 SMs, so three blocks share each tile of 64 keys.
    {"A100",
     "attention_backward float32 width 128 tf32",
     "sm80",
     {{"prepare_rows<float, 16>", 16 * 64, 256},
      kMemset,
      kMemset,
      {"sm80::fold_backward_kernel<float, sm80::BackwardTile<128, 32, 64,", 3 * 4 * 16, 128}}},
    {"A100",
     "attention_backward bfloat16 width 256",
     "sm80",
     {{"prepare_rows<__nv_bfloat16, 32>", 16 * 128, 256},
      {"sm80::fold_backward_kernel<__nv_bfloat16, sm80::BackwardTile<256,", 4 * 16, 256}}},
    {"RTX 5090",
     "attention_backward bfloat16 width 256",
     "simt",
     {{"simt::row_centre<float>", 16 * 128, 256}, {"simt::fold_backward<true,", 16 * 16 * 16, 256}}},
    {"H100",
     "attention_backward float64 width 64",
     "simt",
     {{"simt::row_centre<double>", 16 * 128, 256}, {"simt::fold_backward<true,", 16 * 16 * 16, 256}}},
    {"H100",
     "attention_backward float32 planes width 128 bias, softcap",
     "plan",
     {{"simt::row_centre<float>", 16 * 128, 256},
      {"sm90::gather_residuals", 16 * 4, 256},
      kMemset,
      {"split_heads_kernel<128>", 16 * 128, 256},
      {"split_heads_kernel<128>", 4 * 128, 256},
      {"split_heads_kernel<128>", 4 * 128, 256},
      {"split_heads_kernel<128>", 16 * 128, 256},
      {"sm90::fold_backward_planes_kernel<sm90::PlanesPassTile<(sm90::GradientOf)0, 128, 1, false, 1, 1>",
       16 * 8,
       384,
       {"MemoryBiasedScores<", "float, (Softcap)2>"}},
      {"sm90::fold_backward_planes_kernel<sm90::PlanesPassTile<(sm90::GradientOf)1, 128, 1, false, 1, 1>",
       4 * 8, 384},
      {"sm90::fold_backward_planes_kernel<sm90::PlanesPassTile<(sm90::GradientOf)2, 128, 2, false, 1, 1>",
       4 * 8, 384},
      {"repair_backward_kernel<", 16 * 16 / 8, 256}}},
    {"H100",
     "attention_backward float32 planes width 256 bias",
     "plan",
     {{"simt::row_centre<float>", 16 * 128, 256},
      {"sm90::gather_residuals", 16 * 4, 256},
      kMemset,
      {"split_heads_kernel<128>", 16 * 256, 256},
      {"split_heads_kernel<128>", 4 * 256, 256},
      {"split_heads_kernel<128>", 4 * 256, 256},
      {"split_heads_kernel<128>", 16 * 256, 256},
      {"sm90::fold_backward_planes_kernel<sm90::PlanesPassTile<(sm90::GradientOf)0, 128, 1, false, 2, 3>",
       2 * 16 * 8,
       384,
       {"MemoryBiasedScores<", "float, (Softcap)1>"}},
      {"sm90::fold_backward_planes_kernel<sm90::PlanesPassTile<(sm90::GradientOf)1, 128, 1, false, 2, 3>",
       2 * 4 * 8, 384},
      {"sm90::fold_backward_planes_kernel<sm90::PlanesPassTile<(sm90::GradientOf)2, 128, 1, false, 2, 8>",
       2 * 4 * 8, 384},
      {"repair_backward_kernel<", 16 * 16 / 8, 256}}},
    // In a fixed order: the gradient of a bias that scores share would be added to in any order.
    {"H100",
     "attention_backward float32 planes width 64 shared bias deterministic",
     "simt",
     {{"simt::row_centre<float>", 16 * 128, 256},
      {"simt::fold_backward<true,", 16 * 16, 256},
      {"simt::fold_backward<true,", 4 * 16, 256},
      {"simt::fold_backward<true,", 2 * 16 * 16, 256}}},

    // The grid fills all SMs, unless there are fewer tiles. Tiles are 256 x 256 for a 2-CTA cluster on Hopper, and 256 x 128
    // for a block elsewhere. combine_partial takes 16 rows per block.
    {"H100",
     "cross_entropy_forward bfloat16 large",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256,", 132, 384},
      {"combine_partial<", 512, 128}}},
    {"H100",
     "cross_entropy_forward bfloat16 small",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256,", 2 * 2, 384},
      {"combine_partial<", 7, 128}}},
    {"A100",
     "cross_entropy_forward bfloat16 small",
     "sm80",
     {{"sm80::contraction_kernel<__nv_bfloat16,", 3, 256}, {"combine_partial<", 7, 128}}},
    {"RTX 3060",
     "cross_entropy_forward bfloat16 large",
     "sm80",
     {{"sm80::contraction_kernel<__nv_bfloat16,", 28, 256}, {"combine_partial<", 512, 128}}},
    // Five eighths of the rows are gathered at a time. The last kernel takes all rows.
    {"H100",
     "cross_entropy_forward bfloat16 kept, order",
     "sm90",
     {{"order_rows_kernel", 1, 1024},
      {"scale_rows_kernel<__nv_bfloat16, __nv_bfloat16>", 2560 / 2, 256},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256,", 132, 384},
      {"combine_partial<", 2560 / 16, 128},
      {"scale_rows_kernel<__nv_bfloat16, __nv_bfloat16>", 1536 / 2, 256},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256,", 132, 384},
      {"combine_partial<", 1536 / 16, 128},
      {"sm90::weights_to_gradients_kernel<", 4096, 256}}},
    // Two kernels compute dlogits. The product that gives dX has 16 x 4 tiles, the one that gives dW 32 x 4.
    {"H100",
     "cross_entropy_backward bfloat16 order",
     "sm90",
     {{"order_rows_kernel", 1, 1024},
      {"scale_rows_kernel<__nv_bfloat16, __nv_bfloat16>", 4096 / 2, 256},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, false, 1, 2>, "
       "GradientEpilogue<",
       132, 384},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, false, 1, 2>, "
       "GradientEpilogue<",
       132, 384},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, false, 1, 2>, "
       "sm90::AddEpilogue<",
       2 * 16 * 4, 384},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, true, 1, 2>, "
       "sm90::StoreEpilogue<",
       132, 384},
      {"scale_rows_kernel<float, __nv_bfloat16>", 4096 / 2, 256}}},
    {"A100",
     "cross_entropy_backward bfloat16 bias",
     "sm80",
     {{"sm80::contraction_kernel<__nv_bfloat16,", 108, 256},
      {"sm80::contraction_kernel<__nv_bfloat16,", 108, 256}}},
    {"H100",
     "cross_entropy_backward bfloat16 no workspace",
     "simt",
     {{"simt::fold_backward<false,", 64 * 500, 256}}},
    // A multiprocessor has one block of float64 at a time, two of float32: columns are split to keep them busy.
    {"H100",
     "cross_entropy_forward float64",
     "simt",
     {{"simt::fold_forward<false,", 64 * 2, 256}, {"simt::combine_splits<", 4096 * 32 / 256, 256}}},

    // Log-probabilities have the tiles of cross entropy. On sm80 there are no registers for the largest logit together with a
    // bias.
    {"H100",
     "log_probs_forward bfloat16 top",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, false, 1, 2>, "
       "FoldEpilogue<TopLogProbs<",
       132, 384},
      {"combine_partial<", 256, 128}}},
    {"A100",
     "log_probs_forward bfloat16 top",
     "sm80",
     {{"sm80::contraction_kernel<__nv_bfloat16,", 108, 256}, {"combine_partial<", 256, 128}}},
    {"A100",
     "log_probs_forward bfloat16 top, bias",
     "simt",
     {{"simt::fold_forward<false,", 64 * 10, 256}, {"simt::combine_splits<", 4096 * 32 / 256, 256}}},
    {"A100",
     "log_probs_backward bfloat16 top, bias",
     "sm80",
     {{"sm80::contraction_kernel<__nv_bfloat16,", 108, 256}}},
    {"H100",
     "log_probs_forward bfloat16 kept",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, false, 1, 2>, "
       "sm90::SavingEpilogue<LogProbs<",
       132, 384},
      {"combine_partial<", 256, 128}}},
    // dlogits are made from the saved weights; then come their products.
    {"H100",
     "log_probs_backward bfloat16 kept",
     "sm90",
     {{"sm90::weights_to_gradients_kernel<", 4096, 256},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, false, 1, 2>, "
       "sm90::AddEpilogue<",
       2 * 16 * 4, 384},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, true, 1, 2>, "
       "sm90::StoreEpilogue<",
       132, 384}}},
    {"H100", "log_probs_backward float32", "simt", {{"simt::fold_backward<false,", 64 * 500, 256}}},

    {"H100",
     "distillation_forward bfloat16 mask",
     "sm90",
     {{"order_rows_kernel", 1, 1024},
      {"scale_rows_kernel<__nv_bfloat16, __nv_bfloat16>", 1280 / 4, 256},
      {"scale_rows_kernel<__nv_bfloat16, __nv_bfloat16>", 1280 / 2, 256},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<192, 5, 2,", 132, 384},
      {"combine_partial<", 1280 / 16, 128},
      {"scale_rows_kernel<__nv_bfloat16, __nv_bfloat16>", 768 / 4, 256},
      {"scale_rows_kernel<__nv_bfloat16, __nv_bfloat16>", 768 / 2, 256},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<192, 5, 2,", 132, 384},
      {"combine_partial<", 768 / 16, 128}}},
    {"RTX 5090",
     "distillation_backward bfloat16 mask, teacher",
     "sm80",
     {{"sm80::contraction_kernel<__nv_bfloat16,", 170, 256}}},
    // In planes a cluster takes 256 rows and 128 columns of both scores. If one is narrower than 128, ordinary cores take both.
    {"H100",
     "distillation_forward float32 planes odd sizes",
     "plan",
     {{"sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 2, false, 2, 2>, "
       "FoldEpilogue<NamedDistillation<",
       132, 384},
      {"combine_partial<", 63, 128}}},
    {"H100",
     "distillation_backward float32 planes mask, teacher",
     "plan",
     {{"sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 2, false, 2, 2>, "
       "GradientEpilogue<float,",
       132, 384}}},
    {"H100",
     "distillation_forward float32 planes narrow teacher",
     "simt",
     {{"simt::fold_forward<false,", 32 * 8, 256}, {"simt::combine_splits<", 2048 * 32 / 256, 256}}},
    {"H100",
     "distillation_backward float32 planes narrow teacher",
     "simt",
     {{"simt::fold_backward<false,", 32 * 500, 256}}},
    {"H100",
     "logsumexp_forward large",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16,", 132, 384}, {"combine_partial<", 512, 128}}},
    {"H100",
     "logsumexp_forward some kept, large",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, false, 1, 2>, "
       "sm90::SavingEpilogue<",
       132, 384},
      {"combine_partial<", 512, 128},
      {"sm90::weights_to_gradients_kernel<", 8192, 256}}},
    // 1 x 16 small tiles. Saved weights have the tile's frames.
    {"H100",
     "logsumexp_forward kept, short",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<128, 6, 1, false, 1, 2>, "
       "sm90::SavingEpilogue<",
       2 * 16, 384},
      {"combine_partial<", 256 / 16, 128},
      {"sm90::weights_to_gradients_kernel<", 256, 256}}},

    // Tiles have 128 rows in forward, and 128 hidden units in backward.
    {"H100",
     "mlp_forward bfloat16 few units",
     "sm90",
     {{"sm90::fold_forward_kernel<__nv_bfloat16, sm90::ForwardTile<128, 128, 128, 2, 2, true>,", 128, 384}}},
    {"H100",
     "mlp_forward bfloat16 wide, in parts",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16,", 132, 384},
      {"sm90::contraction_kernel<__nv_bfloat16,", 132, 384}}},
    {"H100",
     "mlp_backward bfloat16 width 128",
     "sm90",
     {{"sm90::fold_backward_kernel<__nv_bfloat16, sm90::BackwardTile<128, 64, true, (sm90::RowSums)0>", 32,
       384}}},
    // So few tiles of 256 x 256 would leave most clusters idle. Those of 256 x 128 are 4 x 8.
    {"H100",
     "mlp_forward bfloat16 few tiles, in parts",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<128, 6, 1,", 2 * 4 * 8, 384},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<128, 6, 1,", 2 * 4 * 8, 384}}},
    {"H100",
     "mlp_backward bfloat16 few tiles, in parts",
     "sm90",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<128, 6, 2,", 2 * 4 * 8, 384},
      {"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<128, 6, 2,", 2 * 4 * 8, 384}}},
    {"H100",
     "mlp_backward bfloat16 deterministic",
     "sm90",
     {{"sm90::fold_backward_pass_kernel<__nv_bfloat16,",
       32,
       384,
       {"PassTile<(sm90::GradientOf)0, 128, true>"}},
      {"sm90::fold_backward_kernel<__nv_bfloat16, sm90::BackwardTile<128, 64, true, (sm90::RowSums)2>", 32,
       384}}},
    {"A100",
     "mlp_backward bfloat16 few units",
     "sm80",
     {{"sm80::contraction_kernel<__nv_bfloat16,", 108, 256},
      {"sm80::contraction_kernel<__nv_bfloat16,", 108, 256}}},
    {"A100",
     "mlp_forward float32 width 256",
     "sm80",
     {{"sm80::fold_forward_kernel<float, sm80::ForwardTile<256,", 64, 128}}},
    {"RTX 3060", "mlp_forward float32 width 256", "simt", {{"simt::fold_forward<true,", 64 * 2, 256}}},
    // In planes: a line of 128 numbers is split by a warp, one of 64 by half a warp. Tiles have 128 rows or units; of 64
    // numbers, 192 rows in forward.
    {"H100",
     "mlp_forward float32 planes width 64",
     "plan",
     {{"split_heads_kernel<64>", 4096 / 16, 256},
      {"split_heads_kernel<64>", 4096 / 16, 256},
      {"split_heads_kernel<64>", 4096 / 16, 256},
      {"sm90::fold_forward_planes_kernel<sm90::PlanesTile<64, 3, 4, 1, 1>, NamedSum<", 22, 512},
      {"repair_forward_kernel<NamedSum<float>", 4096 / 256, 256}}},
    {"H100",
     "mlp_backward float32 planes odd sizes",
     "plan",
     {kMemset,
      {"split_heads_kernel<128>", 126, 256},
      {"split_heads_kernel<128>", 126, 256},
      {"split_heads_kernel<128>", 126, 256},
      {"split_heads_kernel<128>", 126, 256},
      {"sm90::fold_backward_planes_kernel<sm90::PlanesPassTile<(sm90::GradientOf)0, 128, 1, true, 1, 1>", 8,
       384},
      {"sm90::fold_backward_planes_kernel<sm90::PlanesPassTile<(sm90::GradientOf)1, 128, 1, true, 1, 1>", 8,
       384},
      {"sm90::fold_backward_planes_kernel<sm90::PlanesPassTile<(sm90::GradientOf)2, 128, 2, true, 1, 1>", 8,
       384},
      {"repair_backward_kernel<NamedSum<float>", 2, 256}}},
    {"H100", "mlp_backward float32 planes few rows", "simt", {{"simt::fold_backward<true,", 256, 256}}},
    {"A100", "mlp_forward float32 planes width 128", "simt", {{"simt::fold_forward<true,", 64, 256}}},
    // Wider ones are in parts, by clusters with tiles of 256 rows and 128 units.
    {"H100",
     "mlp_forward float32 planes wide, in parts",
     "plan",
     {{"sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 1, false, 2, 2>, "
       "PayloadEpilogue<float, NamedSum<",
       132, 384},
      {"sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 1, false, 2, 2>, "
       "PayloadEpilogue<float, NamedSum<",
       132, 384}}},
    {"H100",
     "mlp_backward float32 planes wide, in parts of rows",
     "plan",
     {{"sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 2, false, 2, 2>, "
       "PayloadEpilogue<float, NamedSum<",
       2 * 4 * 8, 384},
      {"sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 2, false, 2, 2>, "
       "PayloadEpilogue<float, NamedSum<",
       2 * 4 * 8, 384}}},
    {"H100",
     "mlp_backward float32 planes wide, deterministic",
     "plan",
     {{"sm90::contraction_kernel<__half,", 132, 384}, {"sm90::contraction_kernel<__half,", 132, 384}}},
    {"H100",
     "mlp_forward float32 planes wide, no workspace",
     "simt",
     {{"simt::fold_forward<true,", 64, 256}}},

    // The product has 20 x 3 tiles.
    {"H100",
     "rows_product to bfloat16 bfloat16 in order",
     "",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, false, 1, 2>, "
       "sm90::ScatterEpilogue<",
       2 * 20 * 3, 384},
      {"sm90::clear_inactive_rows<__nv_bfloat16>", 2 * 132, 256}}},
    {"A100", "reduce_losses float32 mean, targets", "", {{"reduce_losses_kernel<float>", 1, 1024}}},
    {"H100",
     "combine_cross_entropy float32",
     "",
     {{"combine_states_kernel<CombinedCrossEntropyRows<float>", 79, 64},
      {"reduce_losses_kernel<float>", 1, 1024}}},
    {"A100",
     "combine_distillation float64",
     "",
     {{"combine_states_kernel<CombinedDistillationRows<double>", 79, 64}}},
    {"A100", "order_rows mask", "", {{"order_rows_kernel", 1, 1024}}},
    // A block for each row, and one for the factors.
    {"H100", "clear_rows", "", {{"clear_rows_kernel", 201, 256}}},
    // 20 x 16 tiles, and 20 x 8.
    {"H100",
     "plane_dots",
     "",
     {{"sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 1, false, 2, 2>, sm90::FloatEpilogue",
       132, 384}}},
    {"H100",
     "plane_product",
     "",
     {{"sm90::contraction_kernel<__half, sm90::ContractionTile<128, 3, 1, false, 2, 2>, sm90::FloatEpilogue",
       132, 384}}},
    // One thread per row, then one per column.
    {"H100", "sequence_spans", "", {{"sequence_spans_kernel", 16, 256}}},
    {"H100", "undefine", "", {{"undefine_kernel", 4 * 132, 256}}},
    // A block takes 2048 elements; the last block is not full.
    {"H100", "gated_hidden bfloat16", "", {{"gated_hidden_kernel<__nv_bfloat16, float>", 490, 256}}},
    {"A100", "gated_gradient float64", "", {{"gated_gradient_kernel<double, double>", 490, 256}}},
    // 2-CTA clusters for the product; then one block per row, or a cluster of eight blocks if there are many classes.
    {"H100",
     "score_product",
     "",
     {{"sm90::contraction_kernel<__nv_bfloat16, sm90::ContractionTile<256, 4, 1, false, 1, 2>, "
       "sm90::FloatEpilogue>",
       132, 384}}},
    {"H100", "jsd_rows", "", {{"simt::jsd_rows_kernel<", 1000, 512}}},
    {"H100", "jsd_rows gradients", "", {{"simt::jsd_rows_of_cluster<", 8000, 512}}},
    {"H100", "jsd_gradient", "", {{"simt::jsd_gradient_kernel<", 1000, 512}}},
};

void check_expected(Checks& checks, const Expected& expected, const Call& call) {
  checks.section(expected.machine, expected.call);
  CHECK(checks, expected.tier.empty() || call.tier.substr(0, 4) == expected.tier, call.tier, call.reason);
  CHECK(checks, call.events.size() == expected.launches.size(), call.events.size(), expected.launches.size());
  for (std::size_t n = 0; n < std::min(call.events.size(), expected.launches.size()); ++n) {
    const Launched& launched = expected.launches[n];
    const Event& event = call.events[n];
    const std::string kernel = short_name(event.name);
    CHECK(checks, kernel.starts_with(launched.kernel), kernel, launched.kernel);
    std::size_t from = 0;
    for (const std::string& part : launched.parts) {
      from = kernel.find(part, from);
      CHECK(checks, from != std::string::npos, kernel, part);
    }
    CHECK(checks, event.grid[0] == launched.grid, kernel, event.grid[0], launched.grid);
    CHECK(checks, event.block[0] == launched.threads, kernel, event.block[0], launched.threads);
  }
}

}  // namespace

int main() {
  Checks checks;
  std::size_t found_expected = 0;
  for (const Machine& machine : kMachines) {
    std::map<std::string, Call> calls;
    for (const Call& call : calls_on(machine)) {
      check_call(checks, machine, call);
      checks.section(machine.name, call.name);
      CHECK(checks, calls.emplace(call.name, call).second);  // names are unique
    }
    for (const Expected& expected : kExpected) {
      if (expected.machine != machine.name) continue;
      const auto found = calls.find(expected.call);
      if (found == calls.end()) continue;
      check_expected(checks, expected, found->second);
      ++found_expected;
    }
  }
  checks.section("all machines", "every expected call is made");
  CHECK(checks, found_expected == kExpected.size(), found_expected, kExpected.size());
  return checks.finish();
}
