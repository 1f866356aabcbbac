#include <limits>
#include <optional>

#include "jobs.h"
#include "monoidreduce/launch/most_sizes.h"
#include "monoidreduce/launch/packing.h"
#include "monoidreduce/monoids/cross_entropy.h"
#include "monoidreduce/monoids/distillation.h"
#include "monoidreduce/monoids/log_probs.h"
#include "monoidreduce/monoids/logsumexp.h"
#include "plan.h"
#include "small_tile.h"
#include "tiles.h"

namespace monoidreduce {
namespace {

template <class Call>
Call padded(const Call& given) {
  Call x = given;
  const auto pad = [](auto&... t) { ((t.present() ? t.size[1] = padded_size(t.size[1]) : 0), ...); };
  if constexpr (requires { x.a; })
    pad(x.a, x.b);
  else
    pad(x.x, x.weight);
  if constexpr (requires { x.teacher_x; }) pad(x.teacher_x, x.teacher_weight);
  if constexpr (requires { x.other_a; }) pad(x.other_a, x.other_b);
  return x;
}

// Makes the plan of a forward pass save the dlogits of the first `columns` columns. The scratch then also has frames (row
// maxima): for cross entropy one per row and tile, and one more number per row; for distillation two per row and tile.
void save(Plan& plan, std::int64_t columns) {
  const bool two = plan.sizes.other_width != 0;
  const std::int64_t frames_of_row = parts_of(columns, plan.tile->columns);
  plan.saved = {.columns = columns, .frames = plan.scratch};
  plan.scratch += plan.sizes.rows * (two ? 2 * frames_of_row : frames_of_row + 1);
}

// Takes the SIMT kernels if there is an obstacle(x) to those of tensor cores.
template <class Call>
void refuse_tensor_cores(const Call& x, Choice& choice) {
  if constexpr (requires { obstacle(x); }) {
    if (const char* why = obstacle(x); why != nullptr && choice.family != Family::kSimt)
      choice = Choice{.both = {why}};
  }
}

// Hopper's tile of kernels of one score that are built for both.
const ContractionSizes& wide_or_small(const FoldProblem& p, const DeviceFacts& gpu) {
  const bool small = tiles::small_is_faster(tiles::kSm90Loss.columns, p.rows(), p.columns(), gpu);
  return small ? tiles::kSm90Small : tiles::kSm90Loss;
}

// For a call, with `kernels` that read planes or without.
Planes planes_of(bool kernels, const Launch& launch) {
  return !kernels ? Planes::kNone : launch.planes ? Planes::kWanted : Planes::kUnwanted;
}

// A state of doubles has at most twice the size of a state of floats, so it takes at most as many numbers of scratch.
template <template <class> class M>
inline constexpr bool kSameNumbers =
    sizeof(typename M<double>::State) <= 2 * sizeof(typename M<float>::State);
static_assert(kSameNumbers<CrossEntropy> && kSameNumbers<NamedDistillation> && kSameNumbers<LogSumExp> &&
              kSameNumbers<TopLogProbs>);

// Splits the columns of SIMT kernels, if tiles of rows leave multiprocessors idle. numbers: how many numbers of the accumulation
// type a state has.
void split_columns(Plan& plan, const FoldProblem& p, std::int64_t numbers, const DeviceFacts& gpu) {
  if (p.rows() == 0 || p.columns() == 0) return;
  const std::int64_t row_tiles = parts_of(p.rows(), tiles::kSimt.rows),
                     column_tiles = parts_of(p.columns(), tiles::kSimt.columns);
  const std::int64_t of_tile = std::max<std::int64_t>(parts_of(p.width() + p.other_width(), 128), 1);
  const int places = gpu.multiprocessors * (p.a.dtype == DType::kFloat64 ? 1 : tiles::kSimtBlocks);
  const int splits = splits_of(row_tiles, column_tiles, places, column_tiles, of_tile);
  if (splits == 1) return;
  plan.packing = Packing{1, static_cast<int>(tiles::kSimt.rows), splits};
  plan.scratch = splits * p.rows() * numbers;
}

template <class State, class Call>
Plan forward_plan(const Call& given, const ContractionSizes& sm80, const ContractionSizes& sm90,
                  const DeviceFacts& gpu, const Launch& launch) {
  const Call x = padded(given);
  const FoldProblem p = problem_of(x);
  Choice choice = choose_contraction(p, gpu, planes_of(requires { x.row_planes; }, launch));
  refuse_tensor_cores(x, choice);
  if constexpr (requires { sm80_obstacle(x); }) {
    if (choice.family == Family::kSm80 && (choice.sm80 = Reason(sm80_obstacle(x))))
      choice.family = Family::kSimt;
  }
  Plan plan = plan_of(given, x, choice, launch);
  constexpr std::int64_t kNumbers = sizeof(State) / sizeof(float);
  if (plan.choice.family == Family::kSimt) {
    split_columns(plan, problem_of(given), kNumbers, gpu);
    return plan;
  }
  const ContractionSizes& tile = plan.choice.family == Family::kPlanes ? tiles::kPlanesLoss
                                 : plan.choice.family == Family::kSm90 ? sm90
                                                                       : sm80;
  plan.tile = TileSize{tile.row_block, tile.columns};
  plan.scratch = fold_floats(tile, kNumbers, p, gpu);
  if constexpr (requires { x.saved_columns; }) {
    // In planes, cross entropy and log-sum-exp have kernels that save dlogits. Log-probabilities and distillation have none.
    constexpr bool kPlanesSave = requires { x.kept_upstream; } && !requires { x.teacher_x; };
    const bool multiplies = plan.can().planes && p.width() >= tiles::kNarrowestOfPlanes;
    const bool saves = plan.can().keeps || (kPlanesSave && multiplies);
    if (x.saved_columns > 0 && saves) save(plan, x.saved_columns);
  }
  return plan;
}

// planes: whether the call has kernels that read planes.
template <class Call>
Plan backward_plan(const Call& given, const DeviceFacts& gpu, const Launch& launch, bool planes = false) {
  const Call x = padded(given);
  Choice choice = choose_products(problem_of(x), x.workspace, gpu, launch, planes_of(planes, launch));
  refuse_tensor_cores(x, choice);
  if (const std::int64_t width = problem_of(x).width();
      choice.family == Family::kPlanes && width < tiles::kNarrowestOfPlanes)
    choice = Choice{.both = {"a width of {} is too narrow for products of planes", width}};
  Plan plan = plan_of(given, x, choice, launch);
  if (!plan.can().multiplies) return plan;
  const ContractionSizes& tile = plan.can().planes             ? tiles::kPlanesLoss
                                 : plan.sizes.other_width != 0 ? tiles::kSm90Distillation
                                                               : tiles::kSm90Loss;
  plan.clusters = gpu.multiprocessors / tile.blocks;
  plan.tile = TileSize{tile.row_block, tile.columns};
  return plan;
}

// Whether a logsumexp_matmul runs as a fold whose payload is b itself (Plan::narrow).
bool is_narrow(const Choice& choice, const FoldProblem& p) {
  const std::int64_t fewer = std::min(p.rows(), p.columns()), more = std::max(p.rows(), p.columns());
  return choice.family != Family::kSimt && p.width() <= tiles::kWidestNarrow &&
         (more <= tiles::kFewLines || fewer >= tiles::kManyLines);
}

std::int64_t accumulation_size(DType dtype) { return item_size(accumulation(dtype)); }

// How many lanes must share a row of a program, so that they have registers for all its operands
// (device/simt/program_narrow.cuh). 0: the operands are too wide, or there is nothing to compute.
int lanes_of_program(const Choice& choice, const FoldProblem& p) {
  const bool two = p.other_a.present(), empty = p.width() == 0 || (two && p.other_width() == 0);
  if (choice.family != Family::kSimt || empty || p.rows() == 0 || p.columns() == 0) return 0;
  for (const std::int64_t lanes : {1, 4}) {
    if (lanes == 1 && p.a.dtype == DType::kFloat64) continue;  // the states of four rows spilled 650 bytes
    const std::int64_t vector = lanes * tiles::kRowVector;
    const auto bytes = [&](std::int64_t width) {
      return parts_of(accumulation_size(p.a.dtype) * width, vector) * vector;
    };
    if (bytes(p.width()) + (two ? bytes(p.other_width()) : 0) <= lanes * tiles::kRowBytes)
      return static_cast<int>(lanes);
  }
  return 0;
}
// How threads own the rows of a program, if they can. Columns are split into enough parts to fill the GPU, as far as memory
// allows: each part has a result for every row, and there is room for `room` results in all.
std::optional<OwnedRows> own_rows(const Choice& choice, const FoldProblem& p, const DeviceFacts& gpu,
                                  std::int64_t room) {
  const auto owned = [&](int lanes, const TileSize& tile, std::int64_t at_once) {
    const std::int64_t wanted = parts_of(gpu.multiprocessors * at_once, parts_of(p.rows(), tile.rows)),
                       steps = parts_of(p.columns(), tile.columns);
    return OwnedRows{lanes, std::max<std::int64_t>(std::min({wanted, steps, room / p.rows()}), 1)};
  };
  if (choice.family == Family::kPlanes)
    return owned(tiles::kLanesOfFragment, tiles::kRowGradientPlanes, tiles::kRowBlocksOfPlanes);
  const int lanes = lanes_of_program(choice, p);
  if (lanes == 0) return {};
  return owned(lanes, {tiles::kRowThreads / lanes * tiles::kGroupRows, tiles::kRowColumns},
               tiles::kRowBlocks);
}

// A 16-bit matrix with padded columns.
TensorView matrix(std::int64_t rows, std::int64_t columns) {
  TensorView t;
  t.dtype = DType::kBFloat16, t.rank = 4;
  t.size[0] = t.size[1] = 1, t.size[2] = rows, t.size[3] = padded_size(columns);
  return t;
}

}  // namespace

template <>
Plan plan(const CrossEntropyForward& x, const DeviceFacts& gpu, const Launch& launch) {
  // The kernels that save no dlogits have the wide tile alone.
  const ContractionSizes& sm90 =
      x.saved_columns > 0 ? wide_or_small(cross_entropy_problem(x), gpu) : tiles::kSm90Loss;
  return forward_plan<CrossEntropy<float>::State>(x, tiles::kSm80Loss, sm90, gpu, launch);
}
template <>
Plan plan(const CrossEntropyBackward& x, const DeviceFacts& gpu, const Launch& launch) {
  return backward_plan(x, gpu, launch, true);
}
template <>
Plan plan(const DistillationForward& x, const DeviceFacts& gpu, const Launch& launch) {
  return forward_plan<NamedDistillation<float>::State>(x, tiles::kSm80Distillation, tiles::kSm90Distillation,
                                                       gpu, launch);
}
template <>
Plan plan(const DistillationBackward& x, const DeviceFacts& gpu, const Launch& launch) {
  return backward_plan(x, gpu, launch, true);
}
// A contraction kernel has no registers for the mean of b under a row's softmax. So a narrow call, which saves that mean, takes
// attention's kernels, with b as the values. With few rows and many columns, or the reverse, a call is not narrow (tiles.h).
template <>
Plan plan(const LogSumExpForward& given, const DeviceFacts& gpu, const Launch& launch) {
  const LogSumExpForward x = padded(given);
  const FoldProblem p = logsumexp_problem(x);
  const Choice choice = choose_contraction(p, gpu);
  const bool narrow = is_narrow(choice, p);
  if (given.mean.present() && narrow) {
    Plan plan = plan_of(given, x, choice, launch);
    plan.narrow = true;
    if (choice.family == Family::kSm90) plan.tile = tiles::kNarrow;
    return plan;
  }
  LogSumExpForward call = given;
  if (narrow) call.saved_columns = 0;  // the gradient of b alone is a fold, too
  return forward_plan<LogSumExp<float>::State>(call, tiles::kSm80Loss, wide_or_small(p, gpu), gpu, launch);
}
template <>
Plan plan(const LogSumExpBackward& given, const DeviceFacts& gpu, const Launch& launch) {
  const LogSumExpBackward x = padded(given);
  const FoldProblem p = logsumexp_problem(x);
  const bool by_folds = given.d_a.present() ? given.mean.present() : given.d_b.present();
  if (const Choice choice = choose_contraction(p, gpu); by_folds && is_narrow(choice, p)) {
    Plan plan = plan_of(given, x, choice, launch);
    plan.narrow = true, plan.adds_rows = false;
    if (given.d_b.present()) plan.scratch = tiles::narrow_floats(p.rows());
    if (choice.family == Family::kSm90) plan.tile = tiles::kNarrow;
    return plan;
  }
  Plan plan = backward_plan(given, gpu, launch, true);
  if (plan.choice.family == Family::kSm90) plan.tile->columns = wide_or_small(p, gpu).columns;
  return plan;
}
template <>
Plan plan(const LogProbsForward& x, const DeviceFacts& gpu, const Launch& launch) {
  return forward_plan<TopLogProbs<float>::State>(x, tiles::kSm80Loss, tiles::kSm90Loss, gpu, launch);
}
template <>
Plan plan(const LogProbsBackward& x, const DeviceFacts& gpu, const Launch& launch) {
  return backward_plan(x, gpu, launch, true);
}

template <>
Plan plan(const StatisticsFold& given, const DeviceFacts& gpu, const Launch& launch) {
  const StatisticsFold x = padded(given);
  const FoldProblem p = problem_of(x);
  const bool of_program = x.state_words > 0, two = p.other_a.present();
  const Choice choice = of_program ? choose_contraction(p, gpu, planes_of(true, launch))
                                   : Choice{.both = {"a user's monoid in C++ has no kernels with them"}};
  Plan plan = plan_of(given, x, choice, launch);
  if (of_program && choice.family == Family::kSimt)
    plan.owned_rows = own_rows(choice, p, gpu, std::numeric_limits<std::int64_t>::max());
  if (plan.owned_rows && plan.owned_rows->splits > 1)
    plan.scratch = plan.owned_rows->splits * p.rows() * x.state_words;
  else if (of_program && choice.family == Family::kSimt && !plan.owned_rows)
    split_columns(plan, problem_of(given), x.state_words, gpu);
  const auto take = [&](const ContractionSizes& tile) {
    plan.tile = TileSize{tile.row_block, tile.columns};
    plan.scratch = fold_floats(tile, x.state_words, p, gpu);
    if (x.finds_most) plan.scratch += most_sizes(tile, p.rows(), contraction_schedule(tile, p, gpu)).floats;
  };
  if (plan.choice.family == Family::kPlanes) take(tiles::kPlanesLoss);
  if (plan.choice.family == Family::kSm80) take(two ? tiles::kSm80Distillation : tiles::kSm80Loss);
  if (plan.choice.family == Family::kSm90) {
    if (p.rows() <= tiles::kFewRows)
      take(two ? tiles::kSm90FewDistillation : tiles::kSm90FewLoss);
    else
      take(two ? tiles::kSm90Distillation : tiles::kSm90Loss);
    const std::int64_t slabs = parts_of(p.width(), tiles::kSlab) + parts_of(p.other_width(), tiles::kSlab);
    if (slabs <= tiles::kRowSlabs) plan.payload_slabs = two ? tiles::kPayloadSlabs - 1 : tiles::kPayloadSlabs;
  }
  return plan;
}
template <>
Plan plan(const StatisticsLocalGradient& x, const DeviceFacts& gpu, const Launch& launch) {
  return backward_plan(x, gpu, launch, true);
}
// If rows cannot have owners, the caller takes StatisticsLocalGradient instead.
template <>
Plan plan(const StatisticsRowGradient& given, const DeviceFacts& gpu, const Launch& launch) {
  const StatisticsRowGradient x = padded(given);
  Choice choice = choose_contraction(problem_of(x), gpu, planes_of(!x.other_a.present(), launch));
  if (const std::int64_t width = problem_of(x).width();
      choice.family == Family::kPlanes && width > tiles::kWidestOwned)
    choice = Choice{.both = {"a width of {} is more than {}", width, tiles::kWidestOwned}};
  Plan plan = plan_of(given, x, choice, launch);
  const FoldProblem p = problem_of(choice.family == Family::kPlanes ? x : given);
  const std::int64_t result_bytes = accumulation_size(p.a.dtype) * (p.width() + p.other_width() + 1);
  plan.owned_rows = own_rows(choice, p, gpu, x.workspace / result_bytes);
  if (choice.family == Family::kPlanes) plan.tile = tiles::kRowGradientPlanes;
  return plan;
}

bool can_keep(std::int64_t width, std::int64_t other_width, double scale, const DeviceFacts& gpu) {
  FoldProblem p{};
  p.a = p.b = matrix(1, width);
  if (other_width != 0) p.other_a = p.other_b = matrix(1, other_width);
  p.score.scale = scale;
  return choose_contraction(p, gpu).family == Family::kSm90;
}

const LineNumbers kNarrowLines{tiles::kFewLines, tiles::kManyLines};
bool can_be_narrow(std::int64_t width, double scale, const DeviceFacts& gpu) {
  FoldProblem p{};
  p.a = p.b = matrix(1, width);
  p.score.scale = scale;
  return is_narrow(choose_contraction(p, gpu), p);
}

std::vector<std::int64_t> row_groups(std::int64_t rows, std::int64_t columns, std::int64_t width,
                                     const DeviceFacts& gpu) {
  FoldProblem p{};
  p.a = matrix(rows, width), p.b = matrix(columns, width);
  const TileSchedule schedule = contraction_schedule(tiles::kSm90Loss, p, gpu);
  std::vector<std::int64_t> groups;
  for (int first = 0; first < schedule.row_blocks; first += schedule.count(first))
    groups.push_back(schedule.count(first));
  return groups;
}

}  // namespace monoidreduce
