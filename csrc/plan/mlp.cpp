#include "mlp.h"

#include "monoidreduce/launch/packing.h"
#include "plan.h"
#include "small_tile.h"
#include "tiles.h"

namespace monoidreduce {
namespace {

template <class Call>
Call padded(const Call& given) {
  Call x = given;
  const auto pad = [](std::int64_t& size) { size = padded_size(size); };
  pad(x.x.size[1]), pad(x.w1.size[0]), pad(x.w1.size[1]), pad(x.w2.size[0]), pad(x.w2.size[1]);
  if (x.bias1.present()) pad(x.bias1.size[0]);
  return x;
}

// ---- Planes

// Why Hopper's kernels for planes cannot take float32 operands. given: the call before it was padded.
template <class Call>
Reason planes_obstacle(const Call& given) {
  const FoldProblem p = mlp_problem(given);
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (p.a.dtype != DType::kFloat32) return {};  // for which there are other reasons
  if (std::min(p.width(), p.payload_width()) == 0) return {"the inputs are float32, and a width is 0"};
  if (width > tiles::kWidestPlanes)
    return {"the inputs are float32, and a width is {}, more than {}", width, tiles::kWidestPlanes};
  // The width is counted as the kernels see it, padded, so that 57 is enough.
  const std::int64_t least = std::min({p.rows(), p.columns(), padded_size(width)});
  if (least < tiles::kFewestTerms)
    return {
        "the inputs are float32, and {} rows, hidden units or elements of a row are too few for planes of "
        "float16",
        least};
  return {};
}

// ---- Few rows

// The largest number of splits of the hidden units if rows are few. Partial sums take at most 32 MiB. Each of the four warps
// that combine a row reads every fourth split, one after another, so there may not be too many.
std::int64_t most_splits(const FoldProblem& p) {
  constexpr std::int64_t kMost = 128, kFloats = (32 << 20) / sizeof(float);
  return std::min(kMost, kFloats / (p.rows() * p.payload_width()));
}

// How few rows are packed, if they are few. On sm_80 few rows have the same tiles as many rows, and only splits make more
// blocks.
std::optional<Packing> pack(Family family, const FoldProblem& p, const DeviceFacts& gpu) {
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (family == Family::kSm90) {
    const int columns = tiles::by_width(tiles::kFewRowsColumns, width);
    return pack_few_rows(p, columns, gpu.multiprocessors, most_splits(p));
  }
  const bool floats = p.a.dtype == DType::kFloat32;
  const auto& tile = tiles::by_width(floats ? tiles::kMlpForwardFloats : tiles::kMlpForward, width);
  const int places = gpu.multiprocessors * tile.blocks;
  const std::int64_t row_tiles = parts_of(p.rows(), tile.rows);
  if (!leave_half_idle(row_tiles, places)) return {};
  const int splits = splits_of(row_tiles, parts_of(p.columns(), tile.columns), places, most_splits(p));
  if (splits == 1) return {};
  return Packing{1, tile.rows, splits};
}

TileSize forward_tile(const FoldProblem& p, const std::optional<Packing>& packing) {
  const std::int64_t width = std::max(p.width(), p.payload_width());
  if (!packing) return tiles::mlp_forward(width);
  return {packing->rows, tiles::by_width(tiles::kFewRowsColumns, width)};
}

// ---- In parts
//
// If no tensor-core kernel takes a call whole, it runs in parts, whose hidden values are stored and fit into the workspace. If
// not even a tile fits, the SIMT kernels take the call. In 16 bits torch multiplies. Then a part of the forward pass has some rows
// and all hidden units, so each result is one matrix product. A part of the backward pass has either all rows, and the rows'
// gradient is summed over the parts; or all hidden units, and the weights' gradients are summed. The smaller gradients are the
// ones that are summed.

// How many lines of a matrix fit into `bytes`: all of them, or whole tiles, divided evenly over the parts; 0 if not one tile
// fits.
std::int64_t fitting(std::int64_t bytes, std::int64_t line_bytes, std::int64_t lines, std::int64_t tile) {
  if (lines * line_bytes <= bytes) return lines;
  const std::int64_t tiles_at_once = bytes / (line_bytes * tile), tiles = parts_of(lines, tile);
  if (tiles_at_once == 0) return 0;
  return std::min(lines, parts_of(tiles, parts_of(tiles, tiles_at_once)) * tile);
}

TileSize forward_part(const FoldProblem& p, std::int64_t workspace) {
  return {fitting(workspace, p.columns() * item_size(p.a.dtype), p.rows(), tiles::kHidden.rows), p.columns()};
}
TileSize backward_part(const FoldProblem& p, std::int64_t workspace) {
  // Each hidden unit of a row takes a hidden value and the derivative with respect to it.
  const std::int64_t bytes = 2 * item_size(p.a.dtype);
  const TileSize& tile = tiles::kHiddenGradient;
  const std::int64_t rows = fitting(workspace, p.columns() * bytes, p.rows(), tile.rows),
                     units = fitting(workspace, p.rows() * bytes, p.columns(), tile.columns);
  const bool fewer_rows = p.rows() * p.width() <= p.columns() * (p.width() + p.payload_width());
  if (rows == 0 || (fewer_rows && units > 0)) return {p.rows(), units};
  return {rows, p.columns()};
}

// ---- In parts of float32 operands in planes
//
// Kernels of this library multiply planes, and all results are float32 sums in any case. A cluster computes a tile of a product
// over all terms, so a product of few tiles leaves clusters idle. A part may have some rows and some hidden units: the numbers
// with which its products take the least time.

bool in_planes(const FoldProblem& p) { return p.a.dtype == DType::kFloat32; }

// The time of a product [rows, columns] with so many terms. The unit is the time in which a cluster adds one term to a tile of 256 x
// 128. Adding that tile, 128 KiB, to memory takes about as long as 128 terms (a cluster has 1/66 of an H200's 4.8 TB/s and 600
// TFLOP/s).
std::int64_t time_of_product(std::int64_t rows, std::int64_t columns, std::int64_t terms,
                             const DeviceFacts& gpu) {
  constexpr std::int64_t kTermsOfStore = 128;
  const TileSize& tile = tiles::kHiddenPlanes;
  const std::int64_t clusters = std::max(gpu.multiprocessors / 2, 1);
  return parts_of(parts_of(rows, tile.rows) * parts_of(columns, tile.columns), clusters) *
         (terms + kTermsOfStore);
}

// The size of a part with which all parts of p together take the least time. time(rows, units): of one part. bytes: memory that a
// part needs for each hidden value. The result has 0 units if not even one tile fits into the workspace.
template <class Time>
TileSize part_in_planes(const FoldProblem& p, std::int64_t workspace, std::int64_t bytes, const Time& time) {
  const TileSize& tile = tiles::kHiddenPlanes;
  const std::int64_t row_tiles = parts_of(p.rows(), tile.rows);
  TileSize best{p.rows(), 0};
  std::int64_t least = 0;
  for (std::int64_t most = row_tiles; most > 0; most -= parts_of(most, 8)) {
    const std::int64_t rows = std::min(p.rows(), parts_of(row_tiles, parts_of(row_tiles, most)) * tile.rows),
                       units = fitting(workspace, rows * bytes, p.columns(), tile.columns);
    if (units == 0) continue;
    const std::int64_t all = parts_of(p.rows(), rows) * parts_of(p.columns(), units) * time(rows, units);
    if (best.columns == 0 || all < least) best = {rows, units}, least = all;
    if (units == p.columns()) break;  // fewer rows would only make more parts
  }
  return best;
}

// The planes of a product's operand take as many bytes as its float32 numbers. One operand of a part is in planes at a time.
TileSize forward_part_in_planes(const FoldProblem& p, std::int64_t workspace, const DeviceFacts& gpu) {
  return part_in_planes(p, workspace, 2 * sizeof(float), [&](std::int64_t rows, std::int64_t units) {
    return time_of_product(rows, units, p.width(), gpu) +
           time_of_product(rows, p.payload_width(), units, gpu);
  });
}
TileSize backward_part_in_planes(const FoldProblem& p, std::int64_t workspace, const DeviceFacts& gpu) {
  return part_in_planes(p, workspace, 3 * sizeof(float), [&](std::int64_t rows, std::int64_t units) {
    return time_of_product(rows, units, p.width() + p.payload_width(), gpu) +
           time_of_product(rows, p.width(), units, gpu) + time_of_product(units, p.width(), rows, gpu) +
           time_of_product(p.payload_width(), units, rows, gpu);
  });
}

bool holds_a_tile(const TileSize& part) { return part.rows * part.columns != 0; }

// The family for parts of p, the problem of padded operands. part: of the pass. units: hidden units before they were padded.
Choice choose_parts(const FoldProblem& p, const TileSize& part, std::int64_t units, std::int64_t workspace,
                    const DeviceFacts& gpu, const Launch& launch) {
  const Choice no_room{.both = {"the workspace of {} bytes holds no tile of hidden values", workspace}};
  if (!in_planes(p) || launch.tf32) {
    const Choice choice = choose_multiplied(p, gpu, launch);
    return choice.family == Family::kSimt || holds_a_tile(part) ? choice : no_room;
  }
  // Both passes have the accuracy of planes, or neither. Their products are kernels of this library.
  const bool fits = holds_a_tile(forward_part_in_planes(p, workspace, gpu)) &&
                    holds_a_tile(backward_part_in_planes(p, workspace, gpu));
  FoldProblem terms = p;
  terms.b.size[2] = units;  // zeros make no sum longer
  const Choice choice = choose_contraction(terms, gpu, launch.planes ? Planes::kWanted : Planes::kUnwanted);
  if (fits) return choice;
  if (choice.family != Family::kSimt) return no_room;
  // A mode that would not help is not named.
  const bool would_help =
      !launch.planes && choose_contraction(terms, gpu, Planes::kWanted).family == Family::kPlanes;
  return would_help ? no_room : choice;
}

template <class Call>
Plan parts_plan(const Call& given, const Call& padded, const Choice& choice, const TileSize& part,
                const TileSize& wide, const Choice& whole, const DeviceFacts& gpu, const Launch& launch) {
  Plan plan = plan_of(given, padded, choice, launch);
  plan.whole = whole;
  if (choice.family != Family::kSimt) plan.part = part;
  if (choice.family == Family::kSm90) {
    plan.tile = wide;
    if (tiles::small_is_faster(wide.columns, part.rows, part.columns, gpu))
      plan.tile = TileSize{tiles::kSm90Small.row_block, tiles::kSm90Small.columns};
  }
  if (choice.family == Family::kPlanes) plan.tile = tiles::kHiddenPlanes;
  return plan;
}

// ---- Backward

// Why parts are faster than the fused kernels, which store no hidden value: there would be so few blocks that most SMs are
// idle. No reason if the fused kernels are the faster ones.
//
// With many rows, there may be too few blocks of hidden units. (H100, 16384 rows, bfloat16, time of the fused kernels and in
// parts. Width 128: 1024 units 0.77 and 0.12 ms, 4096 units 0.76 and 0.39. Width 64: 16384 units 0.59 and 1.4.) The float32
// kernels divide the rows among blocks instead.
//
// With many hidden units, there may be too few blocks of rows, if the rows' gradient has its own kernel on Hopper. That is so
// above width 128; up to 128 it is so in the deterministic mode, which was not timed. (16384 units of width 256: 128 rows take
// 0.57 ms in one block and 0.06 in parts. In parts, 1024 rows take 0.14, and 4096 rows, whose blocks would run side by side,
// 0.78.)
//
// With few of both, each pass above width 128 has few blocks. (H200, 2048 rows and units of width 256: 197 us when each pass was
// a launch; in one part 57. Fewer of both, and all passes in one launch, were not timed.)
//
// With fewer rows that holds for fewer units, in Hopper's kernel of all gradients. (H200, whole and in parts. 1024 units: 1024 rows
// of width 64 35 and 24 us, of width 128 46 and 25; 4096 rows of width 128 159 and 42. With 5632 units: 1024 rows of width 64 37
// and 40 us. bench/results/compare/nvidia_h200_mlp_in_parts.json. Parts also take the host longer.)
Reason idle(Family family, const FoldProblem& p, bool adds_rows, const DeviceFacts& gpu) {
  constexpr int kUnits = 128, kManyRows = 8192, kSomeRows = 1024, kRows = 128, kManyUnits = 4096, kShare = 3,
                kSmallShare = 6, kShareOfRows = 5;
  constexpr std::int64_t kManyValues = 1 << 22;  // hidden values
  const std::int64_t units = p.columns(), blocks = parts_of(units, kUnits);
  const std::int64_t rows = p.rows(), row_blocks = parts_of(rows, kRows), all = gpu.multiprocessors;
  if (!adds_rows && units >= kManyUnits && row_blocks * kShareOfRows <= all)
    return {"{} rows are {} blocks for {} multiprocessors", rows, row_blocks, all};
  const bool few = row_blocks * kShare <= all && blocks * kShare <= all;
  if (!adds_rows && !one_kernel_backward(p) && few && rows * units >= kManyValues)
    return {"{} rows and {} hidden units are few blocks for {} multiprocessors", rows, units, all};
  const bool many_rows = rows >= kManyRows && blocks * kShare <= all,
             some_rows =
                 family == Family::kSm90 && adds_rows && rows >= kSomeRows && blocks * kSmallShare <= all;
  if (p.a.dtype == DType::kFloat32 || !(many_rows || some_rows)) return {};
  return {"{} hidden units are {} blocks for {} multiprocessors", units, blocks, all};
}

// Whether parts are so large that launching them takes no longer than multiplying. Parts of the hidden units are not: their
// products of width 128, which are added to the rows' gradient, took 5 ms in all, other products 1 to 2.
bool large(const TileSize& part, const FoldProblem& p) {
  constexpr std::int64_t kValues = 1 << 22;
  return part.columns == p.columns() && part.rows * part.columns >= std::min(p.rows() * p.columns(), kValues);
}

}  // namespace

template <>
Plan plan(const MlpForward& given, const DeviceFacts& gpu, const Launch& launch) {
  const MlpForward x = padded(given);
  const FoldProblem p = mlp_problem(x);
  Limits limits{.has_planes = true, .planes = planes_obstacle(given)};
  if (p.a.dtype == DType::kFloat32 && gpu.shared_bytes < tiles::kForwardFloatsBytes) limits.widest_sm80 = 128;
  const Choice whole = choose_resident(p, limits, gpu, launch);
  Plan plan = plan_of(given, x, whole, launch);
  if (whole.family == Family::kPlanes) {
    const MlpPlanesParts parts(x);
    plan.tile = tiles::resident_planes(std::max(p.width(), p.payload_width()));
    plan.scratch = parts.marks + parts.planes;
    return plan;
  }
  if (whole.family != Family::kSimt) {
    plan.packing = pack(whole.family, p, gpu);
    if (plan.packing && plan.packing->splits > 1)
      plan.scratch = partial_rows_floats(p, plan.packing->splits, 0);
    if (whole.family == Family::kSm90) plan.tile = forward_tile(p, plan.packing);
    return plan;
  }
  const TileSize part =
      in_planes(p) ? forward_part_in_planes(p, x.workspace, gpu) : forward_part(p, x.workspace);
  const Choice parts = choose_parts(p, part, given.w1.size[0], x.workspace, gpu, launch);
  return parts_plan(given, x, parts, part, tiles::kHidden, whole, gpu, launch);
}

template <>
Plan plan(const MlpBackward& given, const DeviceFacts& gpu, const Launch& launch) {
  const MlpBackward x = padded(given);
  const FoldProblem p = mlp_problem(x);
  Limits limits{.widest_sm80 = widest_sm80_backward(p, gpu), .has_planes = true};
  limits.planes = planes_obstacle(given);
  if (launch.deterministic) limits.sm80 = {"the deterministic mode is asked for"};
  Choice whole = choose_resident(p, limits, gpu, launch);
  Plan plan = plan_of(given, x, whole, launch);
  if (whole.family == Family::kPlanes) {
    const MlpPlanesParts parts(x);
    plan.adds_rows = false, plan.streamed_tile = tiles::kPass;
    plan.scratch = parts.marks + parts.planes;
    return plan;
  }
  plan.adds_rows = whole.family != Family::kSm90 || (one_kernel_backward(p) && !launch.deterministic);
  if (whole.family == Family::kSm90) set_backward_tile(plan, p, one_kernel_backward(p));
  const Reason obstacle =
      whole.family == Family::kSimt ? Reason{} : idle(whole.family, p, plan.adds_rows, gpu);
  if (whole.family != Family::kSimt && !obstacle) return plan;
  const TileSize part =
      in_planes(p) ? backward_part_in_planes(p, x.workspace, gpu) : backward_part(p, x.workspace);
  const Choice parts = choose_parts(p, part, given.w1.size[0], x.workspace, gpu, launch);
  if (obstacle && (parts.family == Family::kSimt || !large(part, p))) return plan;
  if (obstacle) whole.both = obstacle;
  return parts_plan(given, x, parts, part, tiles::kHiddenGradient, whole, gpu, launch);
}

}  // namespace monoidreduce
