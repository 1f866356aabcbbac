// Jobs in parts of several blocks (last_round.h). The block with a job's last tile joins its parts: the others leave theirs in
// memory, thread by thread, and it adds them to its own, always in the same order.
//
// A block takes the part that it joins last, so that what others wait for waits for nobody. They wait for blocks before
// theirs in the grid, which have started before them.
#pragma once

#include <cstdint>

#include "monoidreduce/arch/async_copy.cuh"
#include "monoidreduce/arch/flag.cuh"
#include "monoidreduce/kernel/last_round.h"

namespace monoidreduce {

// Threads of a block that have a share of a part, its first ones; and the quads of floats that each leaves.
template <int kThreads_, int kQuads>
struct Handover {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr std::int64_t kOfBlock = std::int64_t{kThreads} * kQuads;
  float4* quads;    // [blocks, quads, threads]
  unsigned* ready;  // [blocks, warps], 0 at first: has the warp left its share

  // Of scratch memory on a boundary of 16 bytes.
  Handover(float* scratch, const LastRound& last)
      : quads(reinterpret_cast<float4*>(scratch)),
        ready(reinterpret_cast<unsigned*>(scratch + 4 * kOfBlock * last.blocks)) {}
  static std::int64_t words(const LastRound& last) { return std::int64_t{last.blocks} * kWarps; }
  static std::int64_t floats(const LastRound& last) { return 4 * kOfBlock * last.blocks + words(last); }

  // By each warp: quad(n) is a thread's n-th.
  template <class Quad>
  __device__ __forceinline__ void leave(Quad quad) const {
    float4* const to = quads + blockIdx.x * kOfBlock + arch::thread_again();
#pragma unroll
    for (int n = 0; n < kQuads; ++n) to[n * kThreads] = quad(n);
    __syncwarp();
    if (arch::thread_again() % 32 == 0)
      arch::add_release(ready + blockIdx.x * kWarps + arch::thread_again() / 32, 1);
  }
  // The same thread's quads of another block's part, when they are there.
  __device__ __forceinline__ const float4* take(int block) const {
    while (arch::load_acquire(ready + block * kWarps + arch::thread_again() / 32) == 0) {
    }
    __syncwarp();
    return quads + block * kOfBlock + arch::thread_again();
  }
};

}  // namespace monoidreduce
