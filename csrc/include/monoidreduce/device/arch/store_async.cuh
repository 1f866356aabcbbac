// Asynchronous stores to the shared memory of another block of a cluster.
#pragma once

#include "monoidreduce/device/arch/shared_memory.cuh"

namespace monoidreduce::arch {

// Stores four numbers in a block of the cluster. They count as 16 bytes of an mbarrier of that block.
__device__ __forceinline__ void store_async(SharedAddress at, const float* x, SharedAddress barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          at),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

}  // namespace monoidreduce::arch
