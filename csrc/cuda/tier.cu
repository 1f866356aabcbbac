#include "tier.h"

#include <cstdlib>
#include <string_view>

#include "monoidreduce/kernel/launch.cuh"
#include "monoidreduce/kernel/schedule.cuh"
#include "sm80/tiles.h"

namespace monoidreduce::cuda {
namespace {

// What MONOIDREDUCE_CUDA_TIER names. Read at every call: a test runs the same call on every tier.
std::string_view named_tier() {
  const char* const named = std::getenv("MONOIDREDUCE_CUDA_TIER");
  return named ? named : "";
}

// What keeps a fold from tensor cores of any kind.
std::string common_obstacle(const FoldProblem& p) {
  if (named_tier() == kSimt) return "MONOIDREDUCE_CUDA_TIER=simt";
  if (p.a.dtype != DType::kBFloat16 && p.a.dtype != DType::kFloat16)
    return message("the inputs are ", name(p.a.dtype), ", not bfloat16 or float16");
  if (p.bias.present() && !p.score.bias_inside && p.score.softcap != 0)
    return "there are both a softcap and a bias of scores";
  if (!(p.score.scale > 0)) return message("the scale is ", p.score.scale, ", not positive");
  if (p.a.numel() == 0 || p.b.numel() == 0) return "there is nothing to fold";
  // Row, column and job numbers are 32-bit.
  const std::int64_t tiles = (std::max(p.rows(), p.columns()) + 63) / 64;
  if (std::max(p.rows(), p.columns()) >= Band::kFar || p.batch() * p.heads() * tiles >= Band::kFar)
    return "there are 2^30 rows, columns or tiles of them, or more";
  return "";
}

std::string width_obstacle(const FoldProblem& p, std::int64_t widest) {
  for (const std::int64_t width : {p.width(), p.payload_width()}) {
    if (width % 8 != 0 || width == 0 || width > widest)
      return message("a width is ", width, ", not a multiple of 8 up to ", widest);
  }
  return "";
}

std::string sm90_obstacle(const FoldProblem& p, std::int64_t widest) {
  if (!kWithSm90) return "this build has no code for sm_90a";
  if (named_tier() == kSm80) return "MONOIDREDUCE_CUDA_TIER=sm80";
  const int device = p.a.cuda_device;
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device),
            minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) return message("the GPU is sm_", major, minor, ", not sm_90");
  if (p.bias.present() && !p.score.bias_inside) return "there is a bias of scores";
  return width_obstacle(p, widest);
}

}  // namespace

Tier fastest_tier(const FoldProblem& p, const Widest& widest, std::string obstacle,
                  std::string sm80_obstacle) {
  if (obstacle.empty()) obstacle = common_obstacle(p);
  if (!obstacle.empty()) return {kSimt, "not sm90 or sm80: " + obstacle};
  const std::string not_sm90 = sm90_obstacle(p, widest.sm90),
                    not_sm80 = sm80_obstacle.empty() ? width_obstacle(p, widest.sm80) : sm80_obstacle;
  if (not_sm90.empty()) return {kSm90, "tensor cores, through sm_90a"};
  if (not_sm80.empty()) return {kSm80, "tensor cores, through mma.sync; not sm90: " + not_sm90};
  return {kSimt, message("not sm90: ", not_sm90, "; not sm80: ", not_sm80)};
}

std::int64_t widest_sm80_backward(const FoldProblem& p) {
  return sm80::fits<sm80::BackwardTiles<false>::Width256>(p) ? 256 : 128;
}

}  // namespace monoidreduce::cuda
