#include "tier.h"

#include <cstdlib>
#include <string_view>

#include "monoidreduce/kernel/schedule.cuh"
#include "monoidreduce/kernel/tensor_map.cuh"

namespace monoidreduce::cuda {

std::string sm90_obstacle(const FoldProblem& p, std::int64_t widest) {
  if (!kWithSm90) return "this build has no code for sm_90a";
  // Read at every call: a test runs the same call on both tiers.
  const char* const named = std::getenv("MONOIDREDUCE_CUDA_TIER");
  if (named && std::string_view(named) == kSimt) return "MONOIDREDUCE_CUDA_TIER=simt";

  const int device = p.a.cuda_device;
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device),
            minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) return message("the GPU is sm_", major, minor, ", not sm_90");
  if (p.a.dtype != DType::kBFloat16 && p.a.dtype != DType::kFloat16)
    return message("the inputs are ", name(p.a.dtype), ", not bfloat16 or float16");
  for (const std::int64_t width : {p.width(), p.payload_width()}) {
    if (width % 8 != 0 || width == 0 || width > widest)
      return message("a width is ", width, ", not a multiple of 8 up to ", widest);
  }
  const bool of_columns = p.bias.stride[0] == 0 && p.bias.stride[1] == 0 && p.bias.stride[2] == 0;
  if (p.bias.present() && !(p.score.bias_inside && of_columns)) return "there is a bias of scores";
  if (!(p.score.scale > 0)) return message("the scale is ", p.score.scale, ", not positive");
  if (p.a.numel() == 0 || p.b.numel() == 0) return "there is nothing to fold";
  // Row, column and job numbers are 32-bit.
  const std::int64_t tiles = (std::max(p.rows(), p.columns()) + 63) / 64;
  if (std::max(p.rows(), p.columns()) >= Band::kFar || p.batch() * p.heads() * tiles >= Band::kFar)
    return "there are 2^30 rows, columns or tiles of them, or more";
  return "";
}

}  // namespace monoidreduce::cuda
