#include "plan.h"

#include <cstdlib>
#include <limits>
#include <string_view>

#include "monoidreduce/error.h"
#include "tiles.h"

namespace monoidreduce {
namespace {

// A build without CUDA makes plans as for a build that has all kernels.
#if defined(MONOIDREDUCE_WITH_SM90) || !defined(MONOIDREDUCE_WITH_CUDA)
constexpr bool kWithSm90 = true;
#else
constexpr bool kWithSm90 = false;
#endif

// The fastest family that MONOIDREDUCE_CUDA_TIER allows. Read at every call, because tests run the same call on every tier.
Family named_family() {
  const char* const named = std::getenv("MONOIDREDUCE_CUDA_TIER");
  const std::string_view tier = named ? named : "";
  if (tier.empty()) return Family::kSm90;
  for (const Family family : {Family::kSimt, Family::kSm80, Family::kSm90}) {
    if (tier == kFamilies[static_cast<int>(family)].name) return family;
  }
  require(false, "MONOIDREDUCE_CUDA_TIER: expected simt, sm80 or sm90, got ", tier);
  return {};
}

// Why a GPU cannot run the kernels of a family.
Reason gpu_obstacle(Family family, const DeviceFacts& gpu) {
  const Capabilities& row = kFamilies[static_cast<int>(family)];
  const bool runs = row.exact_major ? gpu.major == row.major && gpu.minor == 0 : gpu.major >= row.major;
  return runs ? Reason{} : Reason{"the GPU is sm_{}{}, not sm_{}0", gpu.major, gpu.minor, row.major};
}

// Why no tensor-core kernel takes a fold, whatever the mode of mr.float32 is.
Reason common_obstacle(const FoldProblem& p, const DeviceFacts& gpu) {
  if (named_family() == Family::kSimt) return {"MONOIDREDUCE_CUDA_TIER=simt"};
  if (p.a.dtype == DType::kFloat64) return {"the inputs are float64"};
  if (p.batch() * p.heads() * p.rows() * p.columns() == 0) return {"there are no rows or no columns"};
  if (!(p.score.scale > 0)) return {"the scale is {}, not positive", p.score.scale};
  // Row, column and job numbers are 32-bit.
  const std::int64_t tiles = (std::max(p.rows(), p.columns()) + 63) / 64;
  if (std::max(p.rows(), p.columns()) >= tiles::kFar || p.batch() * p.heads() * tiles >= tiles::kFar)
    return {"there are 2^30 rows, columns or tiles of them, or more"};
  return gpu_obstacle(Family::kSm80, gpu);
}

Reason width_obstacle(const FoldProblem& p, std::int64_t widest) {
  for (const TensorView* t : {&p.a, &p.other_a, &p.payload}) {
    if (!t->present()) continue;
    if (t->size[3] == 0) return {"a width is 0"};
    if (t->size[3] > widest) return {"a width is {}, more than {}", t->size[3], widest};
  }
  return {};
}

Reason hopper_obstacle(const DeviceFacts& gpu) {
  if (!kWithSm90) return {"this build has no code for sm_90a"};
  if (named_family() == Family::kSm80) return {"MONOIDREDUCE_CUDA_TIER=sm80"};
  return gpu_obstacle(Family::kSm90, gpu);
}

Reason sm90_obstacle(const FoldProblem& p, std::int64_t widest, const DeviceFacts& gpu) {
  if (p.a.dtype == DType::kFloat32) return {"the inputs are float32, multiplied in tf32"};
  if (const Reason reason = hopper_obstacle(gpu)) return reason;
  const bool biased = p.bias.present() && !p.score.bias_inside;
  if (biased && p.bias.size[3] > 1 && p.bias.stride[3] == 0)
    return {"the bias of scores is the same for all columns"};
  return width_obstacle(p, widest);
}

// Why the resident kernels do not take float32 operands, which torch does not multiply in tf32. A mode is named only where it
// would help.
Reason resident_float32_obstacle(const Limits& limits, bool has_planes, bool wants_planes) {
  if (has_planes && wants_planes) return limits.planes;
  if (has_planes && !limits.planes)
    return {"the inputs are float32, not multiplied in tf32, and mr.float32 does not say emulated"};
  return {"the inputs are float32, not multiplied in tf32"};
}

// The same for the contraction kernels.
Reason contraction_float32_obstacle(const FoldProblem& p, const DeviceFacts& gpu, Planes planes) {
  const Reason reason = hopper_obstacle(gpu);
  if (reason && planes == Planes::kWanted) return reason;
  if (reason || planes == Planes::kNone) return {"the inputs are float32"};
  const bool two = p.other_a.present();
  const std::int64_t other = two                   ? p.other_width()
                             : p.payload.present() ? p.payload_width()
                                                   : p.width(),
                     width = std::min(p.width(), other), least = std::min({p.rows(), p.columns(), width});
  if (least < tiles::kFewestTerms)
    return {
        "the inputs are float32, and {} rows, columns or elements of a row are too few for planes of float16",
        least};
  if (two && width < tiles::kNarrowestOfPlanes)
    return {"the inputs are float32, and a width of {} is too narrow for two scores in planes", width};
  if (planes == Planes::kUnwanted) return {"the inputs are float32, and mr.float32 does not say emulated"};
  return {};
}

constexpr std::int64_t kAnyWidth = std::numeric_limits<std::int64_t>::max();

}  // namespace

PlannedSizes planned_sizes(const FoldProblem& p) {
  return {p.batch(),   p.heads(),       p.column_heads(), p.rows(),
          p.columns(), p.width(),       p.other_width(),  p.payload_width(),
          p.a.dtype,   p.a.cuda_device, p.bias.present(), !p.range.all()};
}

void set_backward_tile(Plan& plan, const FoldProblem& p, bool at_once) {
  if (at_once)
    plan.tile = tiles::at_once(std::max(p.width(), p.payload_width()), p.bias.present());
  else
    plan.streamed_tile = tiles::kPass;
}

std::int64_t widest_sm80_backward(const FoldProblem& p, const DeviceFacts& gpu) {
  const bool floats = p.a.dtype == DType::kFloat32;
  return gpu.shared_bytes >= (floats ? tiles::kBackwardFloatsBytes : tiles::kBackwardBytes) ? 256 : 128;
}

Choice choose_resident(const FoldProblem& p, const Limits& limits, const DeviceFacts& gpu,
                       const Launch& launch) {
  // In planes only where torch does not allow tf32, which is faster.
  const bool exact = p.a.dtype == DType::kFloat32 && !launch.tf32;
  Choice choice{.both = limits.both ? limits.both : common_obstacle(p, gpu)};
  if (!choice.both && exact)
    choice.both =
        resident_float32_obstacle(limits, limits.has_planes && !hopper_obstacle(gpu), launch.planes);
  if (choice.both) return choice;
  if (exact) {
    choice.family = Family::kPlanes;
    return choice;
  }
  choice.sm90 = sm90_obstacle(p, kFamilies[2].widest, gpu);
  if (!choice.sm90) choice.sm90 = limits.sm90;
  choice.sm80 = limits.sm80 ? limits.sm80 : width_obstacle(p, limits.widest_sm80);
  if (!choice.sm80) choice.family = Family::kSm80;
  if (!choice.sm90) choice.family = Family::kSm90;
  return choice;
}

Choice choose_contraction(const FoldProblem& p, const DeviceFacts& gpu, Planes planes) {
  const bool float32 = p.a.dtype == DType::kFloat32;
  Choice choice{.both = common_obstacle(p, gpu)};
  if (!choice.both) choice.both = width_obstacle(p, kAnyWidth);
  if (!choice.both && float32) choice.both = contraction_float32_obstacle(p, gpu, planes);
  if (choice.both) return choice;
  if (float32) {
    choice.family = Family::kPlanes;
    return choice;
  }
  choice.sm90 = sm90_obstacle(p, kAnyWidth, gpu);
  choice.family = choice.sm90 ? Family::kSm80 : Family::kSm90;
  return choice;
}

Choice choose_multiplied(const FoldProblem& p, const DeviceFacts& gpu, const Launch& launch) {
  const char* const config = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  const std::string_view given = config ? config : "";
  if (launch.deterministic && given != ":4096:8" && given != ":16:8")
    return {.both = {"torch's matrix products are deterministic only with CUBLAS_WORKSPACE_CONFIG=:4096:8"}};
  return choose_contraction(p, gpu);
}

Choice choose_products(const FoldProblem& p, std::int64_t workspace, const DeviceFacts& gpu,
                       const Launch& launch, Planes planes) {
  Choice choice = choose_contraction(p, gpu, planes);
  if (choice.family != Family::kSm90 && choice.family != Family::kPlanes)
    choice = choose_multiplied(p, gpu, launch);  // torch multiplies; Hopper has kernels of its own for this
  if (choice.family == Family::kSimt) return choice;
  constexpr std::int64_t kTileColumns = 256;
  // Planes of dlogits take as much memory as the float32 dlogits themselves.
  const std::int64_t item = item_size(p.a.dtype) * (choice.family == Family::kPlanes ? 2 : 1);
  if (workspace / (p.rows() * item * kTileColumns) == 0)
    return {.both = {"the workspace of {} bytes holds no tile a row", workspace}};
  return choice;
}

}  // namespace monoidreduce
