// More of what warps do, for device code that sorts within them (device/contraction/most.cuh). Blocks run one after
// another, and no two warps of a block may want the same lock.
#pragma once

#include "block.h"

inline unsigned word_of_lane(unsigned word, unsigned lane) {
  host::Block& block = host::Block::one();
  block.words[threadIdx.x] = word;
  block.wait_for_warp();
  const unsigned found = block.words[threadIdx.x / host::Block::kWarp * host::Block::kWarp + lane];
  block.wait_for_warp();
  return found;
}
inline std::uint64_t in_halves(std::uint64_t x, unsigned lane) {
  const std::uint64_t high = word_of_lane(static_cast<unsigned>(x >> 32), lane);
  return high << 32 | word_of_lane(static_cast<unsigned>(x), lane);
}
inline std::uint64_t __shfl_xor_sync(unsigned, std::uint64_t x, int lane_mask) {
  return in_halves(x, threadIdx.x % host::Block::kWarp ^ static_cast<unsigned>(lane_mask));
}
inline std::uint64_t __shfl_sync(unsigned, std::uint64_t x, int lane) {
  return in_halves(x, static_cast<unsigned>(lane));
}
inline int __shfl_sync(unsigned, int x, int lane) {
  return static_cast<int>(word_of_lane(static_cast<unsigned>(x), static_cast<unsigned>(lane)));
}
inline unsigned __ballot_sync(unsigned, bool holds) {
  host::Block& block = host::Block::one();
  block.words[threadIdx.x] = holds;
  block.wait_for_warp();
  const unsigned first = threadIdx.x / host::Block::kWarp * host::Block::kWarp;
  unsigned found = 0;
  for (unsigned lane = 0; lane < host::Block::kWarp; ++lane) found |= block.words[first + lane] << lane;
  block.wait_for_warp();
  return found;
}
inline void __syncwarp() { host::Block::one().wait_for_warp(); }
inline void __threadfence() {}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
void __stcg(T* to, T x) {
  *to = x;
}
inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned x) {
  const unsigned before = *at;
  if (before == expected) *at = x;
  if (before != 0) std::fputs("a lock that is held\n", stderr), std::abort();
  return before;
}
inline unsigned atomicExch(unsigned* at, unsigned x) {
  const unsigned before = *at;
  *at = x;
  return before;
}
