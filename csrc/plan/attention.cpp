#include "attention.h"

#include <algorithm>
#include <cstdlib>

#include "monoidreduce/launch/dense_lines.h"
#include "monoidreduce/launch/job_split.h"
#include "monoidreduce/launch/packing.h"
#include "monoidreduce/monoids/logsumexp.h"
#include "plan.h"
#include "tiles.h"

namespace monoidreduce {
namespace {

template <class Call>
Call padded(const Call& given) {
  Call x = given;
  for (TensorView* t : {&x.q, &x.k, &x.v}) t->size[3] = padded_size(t->size[3]);
  return x;
}

// The gradients that are wanted. If none is present yet, all are.
template <class Call>
GradientSet wanted_gradients(const Call& x) {
  const GradientSet wanted{x.d_q.present(), x.d_k.present(), x.d_v.present()};
  return wanted.rows || wanted.of_columns() ? wanted : GradientSet{};
}

// The gradients that a family's kernels compute, given those that are wanted. Up to a width
// of 128, Hopper has one kernel for all gradients, a variant of it without the rows' gradient, and a kernel for the rows'
// gradient alone. With a bias of scores there is only the kernel for all gradients.
GradientSet computed(Family family, const FoldProblem& p, const AttentionBackward& x) {
  const GradientSet wanted = wanted_gradients(x);
  if (family != Family::kSm90 || p.bias.present()) return {};
  if (!one_kernel_backward(p)) return wanted;
  if (!wanted.rows) return {.rows = false};
  if (!wanted.of_columns()) return {.columns = false, .payload = false};
  return {};
}

// tile: the tile of Hopper's kernel for all gradients at once. even: whether all tiles of keys have equally many queries.
JobSharing backward_sharing(Family family, const FoldProblem& p, const GradientSet& computed, TileSize tile,
                            bool even, const DeviceFacts& gpu, const Launch& launch) {
  const bool at_once = family == Family::kSm80 || (one_kernel_backward(p) && computed.of_columns());
  if (!at_once) return {};
  // The scratch of the semaphores has a counter of jobs too.
  if (launch.deterministic && computed.rows) return {.in_turn = true};
  if (family == Family::kSm80) return {};
  const JobSplit split = backward_job_split(tile, p, even, gpu);
  const std::int64_t words = split.slots * tiles::kFixupThreads / 32 + (even ? 0 : 1);
  const std::int64_t quads = tiles::fixup_quads(std::max(p.width(), p.payload_width()));
  return {4 * tiles::kFixupThreads * quads * split.slots + words, words, split.tail.jobs, split.parts};
}

// The scratch of the SIMT kernels in backward: two numbers per query.
template <class Call>
std::int64_t row_numbers(const Call& x) {
  return 2 * x.q.size[0] * x.q.size[1] * x.q.size[2];
}

// Rows of so few columns have large weights. The SIMT kernels form their centres from the columns (docs/numerics.md).
constexpr std::int64_t kFewColumns = 64;

Reason few_columns_obstacle(const FoldProblem& p) {
  if (p.columns() > kFewColumns) return {};
  return {"the inputs are float32, and there are {} columns or fewer", kFewColumns};
}

// Sets what the backward pass in planes takes: a kernel writes each gradient that is wanted.
template <class Call>
void set_planes(Plan& plan, const Call& x) {
  plan.computed = wanted_gradients(x);
  plan.adds_rows = false;
  plan.streamed_tile = tiles::kPass;
  for (const std::int64_t part : PlanesParts(x).floats) plan.scratch += part;
}

// Why Hopper's kernels for planes cannot take float32 operands.
Reason planes_obstacle(const FoldProblem& p, const DeviceFacts& gpu) {
  const std::int64_t width = std::max(p.width(), p.payload_width());
  const bool empty = p.batch() * p.heads() * p.rows() * p.columns() == 0;
  if (empty || p.a.dtype != DType::kFloat32) return {};  // for which there are other reasons
  if (width == 0) return {"the inputs are float32, and all widths are 0"};
  if (width > kWidestHeadsOfPlanes)
    return {"the inputs are float32, and a width is {}, more than {}", width, kWidestHeadsOfPlanes};
  if (p.bias.present() && p.bias.size[3] > 1 && p.bias.stride[3] == 0)
    return {"the inputs are float32, and the bias of scores is the same for all columns"};
  // Kernels compute with strides of 32 bits.
  const std::int64_t apart = std::max(std::abs(p.bias.stride[2]), std::abs(p.bias.stride[3]));
  if (p.bias.present() && apart * item_size(p.bias.dtype) >= std::int64_t{1} << 31)
    return {"the inputs are float32, and rows or columns of the bias of scores are 2^31 bytes apart or more"};
  if (pack_few_rows(p, 64, gpu.multiprocessors)) return {"the inputs are float32, and there are few rows"};
  return {};
}

// The floats that a forward pass in planes needs: the counter of jobs, and the planes of q, k and v.
template <class Call>
std::int64_t forward_planes_scratch(const Call& x) {
  std::int64_t floats = tiles::kCounterFloats;
  for (const TensorView* t : {&x.q, &x.k, &x.v})
    floats += t->size[0] * t->size[1] * t->size[2] * planes_of_head(std::max(x.q.size[3], x.v.size[3])) / 2;
  return floats;
}

// Whether blocks of a forward pass take their jobs, tiles of rows, from a counter: some take longer than others, and there are
// more of them than blocks. even: all take equally long.
bool counts_jobs(const FoldProblem& p, TileSize tile, bool even, const DeviceFacts& gpu) {
  return !even && p.batch() * p.heads() * parts_of(p.rows(), tile.rows) > gpu.multiprocessors;
}

// Why Hopper's kernels cannot take attention with a user's score_mod or mask_mod. in_order: sums have a fixed order.
template <class Call>
Limits modified_limits(const Call& x, bool in_order, const DeviceFacts& gpu) {
  const std::int64_t width = std::max(x.q.size[3], x.v.size[3]);
  Limits limits{.has_planes = true, .planes = planes_obstacle(modified_problem(x), gpu)};
  if (width > kWidestOfBlock)
    limits.planes = {"functions modify scores, the inputs are float32, and a width is {}, more than {}",
                     width, kWidestOfBlock};
  if (width > 128)
    limits.sm90 = {"functions modify scores, and a width is more than 128"};
  else if (in_order && x.blocks.present())
    limits.sm90 = {"blocks are skipped, and the deterministic mode is asked for"};
  return limits;
}

}  // namespace

template <>
Plan plan(const AttentionForward& given, const DeviceFacts& gpu, const Launch& launch) {
  const AttentionForward x = padded(given);
  const FoldProblem p = attention_problem(x);
  const Limits limits{.has_planes = true, .planes = planes_obstacle(p, gpu)};
  Plan plan = plan_of(given, x, choose_resident(p, limits, gpu, launch), launch);
  if (plan.choice.family == Family::kPlanes) {
    plan.tile = tiles::resident_planes(std::max(p.width(), p.payload_width()));
    plan.scratch = forward_planes_scratch(x);
  }
  if (plan.choice.family != Family::kSm90) return plan;
  const int columns = tiles::by_width(tiles::kFewRowsColumns, std::max(p.width(), p.payload_width()));
  if (const auto packing = pack_few_rows(p, columns, gpu.multiprocessors)) {
    plan.packing = packing;
    constexpr std::int64_t kStateFloats = sizeof(LogSumExp<float>::State) / sizeof(float);
    if (packing->splits > 1) plan.scratch = partial_rows_floats(p, packing->splits, kStateFloats);
    plan.tile = TileSize{packing->rows, columns};
    return plan;
  }
  // A tile of packed sequences has columns of other sequences, and the wider it is the more. (Lengths of 512 on average, width
  // 128: 1.56 pairs are multiplied for each that is kept with 192 columns, 1.37 with 128.)
  const std::int64_t tile_columns = x.row_spans.present() ? tiles::kFewColumns : p.columns();
  plan.tile = tiles::attention_forward(std::max(p.width(), p.payload_width()), tile_columns,
                                       p.score.softcap != 0, p.bias.present() ? item_size(p.bias.dtype) : 0);
  if (counts_jobs(p, *plan.tile, p.range.all(), gpu)) plan.scratch = 2;  // 8 bytes
  return plan;
}

template <>
Plan plan(const AttentionBackward& given, const DeviceFacts& gpu, const Launch& launch) {
  const AttentionBackward x = padded(given);
  const FoldProblem p = attention_problem(x);
  Limits limits{.widest_sm80 = widest_sm80_backward(p, gpu), .has_planes = true};
  limits.planes = planes_obstacle(p, gpu);
  if (!limits.planes) limits.planes = few_columns_obstacle(p);
  if (!x.grad_out.present()) limits.both = {"only the log-sum-exp has a gradient"};
  if (p.bias.present() && std::max(p.width(), p.payload_width()) > 128)
    limits.sm90 = {"there is a bias of scores, and a width is more than 128"};
  if (launch.deterministic && x.d_bias.present() && repeats(x.d_bias))
    limits.both = {"scores share a bias whose gradient is wanted, and the deterministic mode is asked for"};
  Plan plan = plan_of(given, x, choose_resident(p, limits, gpu, launch), launch);
  const Family family = plan.choice.family;
  plan.computed = computed(family, p, x);
  const bool at_once = one_kernel_backward(p) && plan.computed.of_columns();
  plan.adds_rows = family != Family::kSm90 || (at_once && plan.computed.rows);
  if (family == Family::kSimt) {
    plan.scratch = row_numbers(x);
  } else if (family == Family::kPlanes) {
    set_planes(plan, x);
  } else {
    const TileSize tile = tiles::at_once(std::max(p.width(), p.payload_width()), p.bias.present());
    plan.sharing = backward_sharing(family, p, plan.computed, tile, p.range.all(), gpu, launch);
    if (family == Family::kSm90) set_backward_tile(plan, p, at_once);
    for (const std::int64_t part : BackwardParts(x, plan.sharing).floats) plan.scratch += (part + 3) / 4 * 4;
  }
  return plan;
}

template <>
Plan plan(const ModifiedAttentionForward& given, const DeviceFacts& gpu, const Launch& launch) {
  const ModifiedAttentionForward x = padded(given);
  const FoldProblem p = modified_problem(x);
  Plan plan = plan_of(given, x, choose_resident(p, modified_limits(x, false, gpu), gpu, launch), launch);
  if (plan.choice.family == Family::kPlanes)
    plan.tile = tiles::kModifiedPlanes, plan.scratch = forward_planes_scratch(x);
  if (plan.choice.family != Family::kSm90) return plan;
  plan.tile = tiles::modified_forward(std::max(p.width(), p.payload_width()), x.row_spans.present());
  if (counts_jobs(p, *plan.tile, is_even(x), gpu)) plan.scratch = 2;  // 8 bytes
  return plan;
}

template <>
Plan plan(const ModifiedAttentionBackward& given, const DeviceFacts& gpu, const Launch& launch) {
  const ModifiedAttentionBackward x = padded(given);
  const FoldProblem p = modified_problem(x);
  Limits limits = modified_limits(x, launch.deterministic, gpu);
  limits.widest_sm80 = widest_sm80_backward(p, gpu);
  if (!limits.planes) limits.planes = few_columns_obstacle(p);
  Plan plan = plan_of(given, x, choose_resident(p, limits, gpu, launch), launch);
  const Family family = plan.choice.family;
  if (family == Family::kSimt) {
    plan.scratch = row_numbers(x);
    return plan;
  }
  if (family == Family::kPlanes) {
    set_planes(plan, x);
    return plan;
  }
  const TileSize tile = tiles::modified_backward(std::max(p.width(), p.payload_width()), takes_lean_tile(x));
  plan.sharing = backward_sharing(family, p, plan.computed, tile, is_even(x), gpu, launch);
  if (family == Family::kSm90) plan.tile = tile;
  for (const std::int64_t part : BackwardParts(x, plan.sharing).floats) plan.scratch += (part + 3) / 4 * 4;
  return plan;
}

}  // namespace monoidreduce
