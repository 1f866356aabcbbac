#include "tier.h"

#include <cstdlib>
#include <limits>
#include <string_view>

#include "monoidreduce/error.h"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "sm80/tiles.h"

namespace monoidreduce::cuda {
namespace {

// What MONOIDREDUCE_CUDA_TIER names. Read at every call: a test runs the same call on every tier.
std::string_view named_tier() {
  const char* const named = std::getenv("MONOIDREDUCE_CUDA_TIER");
  const std::string_view tier = named ? named : "";
  require(tier.empty() || tier == kSimt || tier == kSm80 || tier == kSm90,
          "MONOIDREDUCE_CUDA_TIER: expected simt, sm80 or sm90, got ", tier);
  return tier;
}

// What keeps a fold from tensor cores of any kind. tf32: are there kernels for float32, and may they round to it.
std::string common_obstacle(const FoldProblem& p, bool tf32 = false) {
  if (named_tier() == kSimt) return "MONOIDREDUCE_CUDA_TIER=simt";
  if (p.a.dtype == DType::kFloat32 && !tf32) return "the inputs are float32, not multiplied in tf32";
  if (p.a.dtype == DType::kFloat64) return "the inputs are float64";
  if (p.batch() * p.heads() * p.rows() * p.columns() == 0) return "there are no rows or no columns";
  if (!(p.score.scale > 0)) return message("the scale is ", p.score.scale, ", not positive");
  // Row, column and job numbers are 32-bit.
  const std::int64_t tiles = (std::max(p.rows(), p.columns()) + 63) / 64;
  if (std::max(p.rows(), p.columns()) >= Band::kFar || p.batch() * p.heads() * tiles >= Band::kFar)
    return "there are 2^30 rows, columns or tiles of them, or more";
  return "";
}

std::string width_obstacle(const FoldProblem& p, std::int64_t widest) {
  for (const TensorView& t : {p.a, p.other_a, p.payload}) {
    if (!t.present()) continue;
    const std::int64_t width = t.size[3];
    if (width == 0) return "a width is 0";
    if (width % 8 != 0) return message("a width is ", width, ", not a multiple of 8");
    if (width > widest) return message("a width is ", width, ", more than ", widest);
  }
  return "";
}

bool has_score_bias(const FoldProblem& p) { return p.bias.present() && !p.score.bias_inside; }

std::string sm90_obstacle(const FoldProblem& p, std::int64_t widest) {
  if (p.a.dtype == DType::kFloat32) return "the inputs are float32, multiplied in tf32";
  if (!kWithSm90) return "this build has no code for sm_90a";
  if (named_tier() == kSm80) return "MONOIDREDUCE_CUDA_TIER=sm80";
  const int device = p.a.cuda_device;
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device),
            minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) return message("the GPU is sm_", major, minor, ", not sm_90");
  if (has_score_bias(p) && p.bias.size[3] > 1 && p.bias.stride[3] == 0)
    return "the bias of scores is the same for all columns";
  return width_obstacle(p, widest);
}

// not_sm90: what keeps a call that the sm80 tier takes from Hopper's; "" for nothing.
Tier of_tensor_cores(const std::string& not_sm90) {
  if (not_sm90.empty()) return {kSm90, "tensor cores, through sm_90a"};
  return {kSm80, "tensor cores, through mma.sync; not sm90: " + not_sm90};
}

}  // namespace

Tier not_tensor_cores(const std::string& obstacle) { return {kSimt, "not sm90 or sm80: " + obstacle}; }

Tier fastest_tier(const FoldProblem& p, const Widest& widest, const Launch& launch,
                  const Obstacles& obstacles) {
  const std::string obstacle = obstacles.both.empty() ? common_obstacle(p, launch.tf32) : obstacles.both;
  if (!obstacle.empty()) return not_tensor_cores(obstacle);
  std::string not_sm90 = sm90_obstacle(p, widest.sm90), not_sm80 = obstacles.sm80;
  if (not_sm90.empty()) not_sm90 = obstacles.sm90;
  if (not_sm80.empty()) not_sm80 = width_obstacle(p, widest.sm80);
  if (not_sm90.empty() || not_sm80.empty()) return of_tensor_cores(not_sm90);
  return {kSimt, message("not sm90: ", not_sm90, "; not sm80: ", not_sm80)};
}

std::int64_t widest_sm80_forward(const FoldProblem& p, bool transposed) {
  using Memory = monoidreduce::sm80::ForwardMemory<float, sm80::FloatForwardTiles<true>::Width256>;
  return !transposed || p.a.dtype != DType::kFloat32 || sm80::fits<Memory>(p) ? 256 : 128;
}

std::int64_t widest_sm80_backward(const FoldProblem& p) {
  const auto fits = [&](auto element) {
    using E = decltype(element);
    return sm80::backward_fits<E, typename sm80::BackwardTiles<E, false>::Width256>(p);
  };
  return (p.a.dtype == DType::kFloat32 ? fits(float{}) : fits(__half{})) ? 256 : 128;
}

std::int64_t padded_size(std::int64_t size) { return (size + 7) / 8 * 8; }

std::string padding_of_width(std::int64_t width) {
  return width % 8 == 0 ? "" : message("; of width ", padded_size(width), ", padded from ", width);
}

Tier contraction_tier(const FoldProblem& p) {
  constexpr std::int64_t kAnyWidth = std::numeric_limits<std::int64_t>::max();
  std::string obstacle = common_obstacle(p), padding;
  FoldProblem padded = p;
  for (TensorView* t : {&padded.a, &padded.other_a}) {
    if (!t->present()) continue;
    padding += padding_of_width(t->size[3]);
    t->size[3] = padded_size(t->size[3]);
  }
  if (obstacle.empty()) obstacle = width_obstacle(padded, kAnyWidth);
  if (!obstacle.empty()) return not_tensor_cores(obstacle);
  Tier tier = of_tensor_cores(sm90_obstacle(padded, kAnyWidth));
  tier.reason += padding;
  return tier;
}

Tier multiplied_tier(const FoldProblem& p, const Launch& launch) {
  const char* const config = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  const std::string_view given = config ? config : "";
  if (launch.deterministic && given != ":4096:8" && given != ":16:8")
    return not_tensor_cores(
        "torch's matrix products are deterministic only with CUBLAS_WORKSPACE_CONFIG=:4096:8");
  return contraction_tier(p);
}

Tier products_tier(const FoldProblem& p, std::int64_t workspace, const Launch& launch) {
  Tier tier = contraction_tier(p);
  if (tier.name != kSm90) tier = multiplied_tier(p, launch);  // Hopper's products are kernels of this library
  if (tier.name == kSimt) return tier;
  constexpr std::int64_t kTileColumns = 256;
  if (workspace / (p.rows() * item_size(p.a.dtype) * kTileColumns) == 0)
    return not_tensor_cores(message("the workspace of ", workspace, " bytes holds no tile a row"));
  return tier;
}

bool can_keep(int cuda_device, std::int64_t width, std::int64_t other_width, double scale,
              const Launch& launch) {
  const auto matrix = [&](std::int64_t columns) {
    TensorView t;
    t.dtype = DType::kBFloat16, t.cuda_device = cuda_device, t.rank = 4;
    t.size[0] = t.size[1] = t.size[2] = 1, t.size[3] = columns;
    return t;
  };
  FoldProblem p{};
  p.a = p.b = matrix(width);
  if (other_width != 0) p.other_a = p.other_b = matrix(other_width);
  p.score.scale = scale;
  return products_tier(p, std::numeric_limits<std::int64_t>::max(), launch).name == kSm90;
}

void require_scratch(const TensorView& scratch, const Tier& tier) {
  const std::int64_t elements = scratch.present() ? scratch.numel() : 0;
  require(elements >= tier.scratch, "scratch: expected ", tier.scratch, " elements, got ", elements);
}

}  // namespace monoidreduce::cuda
