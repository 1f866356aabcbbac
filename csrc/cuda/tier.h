// Which of the GPU's kernels a call runs on.
#pragma once

#include "monoidreduce/fold.h"
#include "monoidreduce/operators.h"

namespace monoidreduce::cuda {

inline constexpr const char *kSimt = "simt", *kSm90 = "sm90";

#ifdef MONOIDREDUCE_WITH_SM90
inline constexpr bool kWithSm90 = true;
#else
inline constexpr bool kWithSm90 = false;
#endif

// What keeps a fold with a payload from Hopper's kernels, "" if nothing does. widest: the width that they go up to. Of a
// bias only those of columns are known to them (as in the MLP).
std::string sm90_obstacle(const FoldProblem& p, std::int64_t widest);

inline Tier tier_of(const std::string& obstacle) {
  return obstacle.empty() ? Tier{kSm90, "tensor cores, through sm_90a"}
                          : Tier{kSimt, "not sm90: " + obstacle};
}

namespace sm90 {
// Widths that its kernels go up to.
inline constexpr std::int64_t kWidestForward = 256, kWidestBackward = 128;
}  // namespace sm90

}  // namespace monoidreduce::cuda
