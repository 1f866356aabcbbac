// StreamKFixup: the fix-up of stream-K, which joins the parts of jobs that are split over several blocks
// (schedule.cuh). The block with a job's last tile adds the parts. The other blocks store theirs to global
// memory, thread by thread, and it adds them to its own in a fixed order. Each stored part has a place. If there
// are more places than slots of memory, places take turns, and a block waits until its slot has been read.
//
// In the stream-K tail a block has one place. It first computes the part that another block joins, then the part
// that it joins itself. So a block never waits before it has stored what others wait for. A joining block waits
// only for blocks before it in the grid, which have started earlier. Parts of other jobs are taken from a
// counter, and each but a job's last has a place. Blocks wait only for parts with lower numbers.
#pragma once

#include <cstdint>

#include "monoidreduce/device/arch/async_copy.cuh"
#include "monoidreduce/device/arch/flag.cuh"

namespace monoidreduce {

// kThreads: the first threads of a block hold its part. kQuads: the number of float4 that each of them
// stores.
template <int kThreads_, int kQuads>
struct StreamKFixup {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr std::int64_t kOfSlot = std::int64_t{kThreads} * kQuads;
  float4* quads;    // [slots, quads, threads]
  unsigned* state;  // [slots, warps], initially 0; + 1 once a warp's share is stored, + 1 once it is read
  int slots;

  // scratch: aligned to 16 bytes.
  StreamKFixup(float* scratch, int slots)
      : quads(reinterpret_cast<float4*>(scratch)),
        state(reinterpret_cast<unsigned*>(scratch + 4 * kOfSlot * slots)),
        slots(slots) {}
  // The first word behind its scratch.
  unsigned* end() const { return state + slots * kWarps; }

  // Called by each warp of a block that does not join: stores quad(n) as the thread's n-th float4, then
  // signals it.
  template <class Quad>
  __device__ __forceinline__ void leave(int place, Quad quad) const {
    float4* const to = of_thread(place);
    await(place, 0);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) to[n * kThreads] = quad(n);
    pass(place);
  }
  // Called by each warp of the joining block: waits for another block's part, and calls read with what the same
  // thread stored there.
  template <class Read>
  __device__ __forceinline__ void take(int place, Read read) const {
    await(place, 1);
    read(of_thread(place));
    pass(place);
  }

 private:
  __device__ __forceinline__ float4* of_thread(int place) const {
    return quads + place % slots * kOfSlot + arch::thread_again();
  }
  __device__ __forceinline__ unsigned* of_warp(int place) const {
    return state + place % slots * kWarps + arch::thread_again() / 32;
  }
  __device__ __forceinline__ void await(int place, unsigned stored) const {
    const unsigned expected = 2 * (place / slots) + stored;
    while (arch::load_acquire(of_warp(place)) != expected) {
    }
    __syncwarp();
  }
  __device__ __forceinline__ void pass(int place) const {
    __syncwarp();
    if (arch::thread_again() % 32 == 0) arch::add_release(of_warp(place), 1);
  }
};

}  // namespace monoidreduce
