// The fix-up of jobs that are split over several blocks (the stream-K tail of last_round.h). The block with a job's last
// tile joins the parts. The other blocks store theirs, thread by thread; it adds them to its own in a fixed order.
//
// A block first computes the part that another block joins, and then the part that it joins itself. So a part that others
// wait for never waits. A joining block waits only for blocks before it in the grid, which have started earlier.
#pragma once

#include <cstdint>

#include "monoidreduce/device/arch/async_copy.cuh"
#include "monoidreduce/device/arch/flag.cuh"
#include "monoidreduce/device/schedule/last_round.h"

namespace monoidreduce {

// kThreads: the first threads of a block, which hold its part. kQuads: the quads of floats that each of them stores.
template <int kThreads_, int kQuads>
struct Handover {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr std::int64_t kOfBlock = std::int64_t{kThreads} * kQuads;
  float4* quads;    // [blocks, quads, threads]
  unsigned* ready;  // [blocks, warps], 0 at first; 1 once the warp has stored its share

  // scratch: 16-byte aligned.
  Handover(float* scratch, const LastRound& last)
      : quads(reinterpret_cast<float4*>(scratch)),
        ready(reinterpret_cast<unsigned*>(scratch + 4 * kOfBlock * last.blocks)) {}
  static std::int64_t words(const LastRound& last) { return std::int64_t{last.blocks} * kWarps; }
  static std::int64_t floats(const LastRound& last) { return 4 * kOfBlock * last.blocks + words(last); }

  // Called by each warp: stores quad(n) as the thread's n-th quad.
  template <class Quad>
  __device__ __forceinline__ void leave(Quad quad) const {
    float4* const to = quads + blockIdx.x * kOfBlock + arch::thread_again();
#pragma unroll
    for (int n = 0; n < kQuads; ++n) to[n * kThreads] = quad(n);
    __syncwarp();
    if (arch::thread_again() % 32 == 0)
      arch::add_release(ready + blockIdx.x * kWarps + arch::thread_again() / 32, 1);
  }
  // Waits for another block's part, and returns the quads of the same thread.
  __device__ __forceinline__ const float4* take(int block) const {
    while (arch::load_acquire(ready + block * kWarps + arch::thread_again() / 32) == 0) {
    }
    __syncwarp();
    return quads + block * kOfBlock + arch::thread_again();
  }
};

}  // namespace monoidreduce
