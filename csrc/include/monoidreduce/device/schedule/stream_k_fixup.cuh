// StreamKFixup: the fix-up of the stream-K tail (stream_k_tail.h), which joins the parts of jobs that are split over
// several blocks. The block with a job's last tile adds the parts. The other blocks store theirs to global
// memory, thread by thread, and it adds them to its own in a fixed order.
//
// A block first computes the part that another block joins, then the part that it joins itself. So a block
// never waits before it has stored what others wait for. A joining block waits only for blocks before it in
// the grid, which have started earlier.
#pragma once

#include <cstdint>

#include "monoidreduce/device/arch/async_copy.cuh"
#include "monoidreduce/device/arch/flag.cuh"
#include "monoidreduce/device/schedule/stream_k_tail.h"

namespace monoidreduce {

// kThreads: the first threads of a block hold its part. kQuads: the number of float4 that each of them
// stores.
template <int kThreads_, int kQuads>
struct StreamKFixup {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr std::int64_t kOfBlock = std::int64_t{kThreads} * kQuads;
  float4* quads;    // [blocks, quads, threads]
  unsigned* ready;  // [blocks, warps], initially 0; 1 once the warp has stored its share

  // scratch: aligned to 16 bytes.
  StreamKFixup(float* scratch, const StreamKTail& last)
      : quads(reinterpret_cast<float4*>(scratch)),
        ready(reinterpret_cast<unsigned*>(scratch + 4 * kOfBlock * last.blocks)) {}
  static std::int64_t words(const StreamKTail& last) { return std::int64_t{last.blocks} * kWarps; }
  static std::int64_t floats(const StreamKTail& last) { return 4 * kOfBlock * last.blocks + words(last); }

  // Called by each warp of a block that does not join: stores quad(n) as the thread's n-th float4, then
  // signals it.
  template <class Quad>
  __device__ __forceinline__ void leave(Quad quad) const {
    float4* const to = quads + blockIdx.x * kOfBlock + arch::thread_again();
#pragma unroll
    for (int n = 0; n < kQuads; ++n) to[n * kThreads] = quad(n);
    __syncwarp();
    if (arch::thread_again() % 32 == 0)
      arch::add_release(ready + blockIdx.x * kWarps + arch::thread_again() / 32, 1);
  }
  // Called by each warp of the joining block: waits for another block's part, and returns what the same
  // thread stored there.
  __device__ __forceinline__ const float4* take(int block) const {
    while (arch::load_acquire(ready + block * kWarps + arch::thread_again() / 32) == 0) {
    }
    __syncwarp();
    return quads + block * kOfBlock + arch::thread_again();
  }
};

}  // namespace monoidreduce
