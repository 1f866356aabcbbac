// RowSemaphores: semaphores that make blocks add to the same floats in a fixed order, so that the bits of each sum
// are the same in every run (the deterministic mode).
#pragma once

#include <cstdint>

#include "monoidreduce/device/arch/async_copy.cuh"
#include "monoidreduce/device/arch/flag.cuh"

namespace monoidreduce {

struct RowSemaphores {
  static constexpr int kRows = 8;  // each semaphore guards at least this many rows

  // Word 0 counts the jobs that have been taken. The semaphores follow, [batch, heads, of_head]: how many
  // jobs have added. All are initially 0. Null: jobs add in any order.
  unsigned* words = nullptr;
  int of_head = 0;

  RowSemaphores() = default;
  RowSemaphores(float* scratch, std::int64_t padded_rows)
      : words(reinterpret_cast<unsigned*>(scratch)), of_head(static_cast<int>(padded_rows / kRows)) {}
  // The number of words of scratch memory.
  static std::int64_t words_of(std::int64_t batch_heads, std::int64_t padded_rows) {
    return 1 + batch_heads * (padded_rows / kRows);
  }

  // The number of the calling block's job. If blocks wait for each other, jobs are numbered in the order in
  // which blocks start. A block waits only for smaller numbers, and those blocks are already running. shared:
  // a word of shared memory.
  __device__ __forceinline__ int job(int* shared) const {
    if (words == nullptr) return blockIdx.x;
    if (threadIdx.x == 0) *shared = static_cast<int>(atomicAdd(words, 1u));
    __syncthreads();
    return *shared;
  }
  // Called by a warp: waits until `before` jobs have added to its share of the rows from row0 on. Their
  // additions are then visible.
  __device__ __forceinline__ void await(std::int64_t batch_head, int row0, int share, unsigned before) const {
    if (words == nullptr) return;
    while (arch::load_acquire(word(batch_head, row0, share)) != before) {
    }
    __syncwarp();
  }
  // Called by a warp after it has added: releases the semaphore for the next job.
  __device__ __forceinline__ void pass(std::int64_t batch_head, int row0, int share) const {
    if (words == nullptr) return;
    __syncwarp();
    if (arch::thread_again() % 32 == 0) arch::add_release(word(batch_head, row0, share), 1);
  }

 private:
  // 32-bit indices suffice: 2^32 words guard more rows than fit into any GPU.
  __device__ __forceinline__ unsigned* word(std::int64_t batch_head, int row0, int share) const {
    const unsigned head = static_cast<unsigned>(batch_head);
    return words + 1 + (head * of_head + row0 / kRows + share);
  }
};

}  // namespace monoidreduce
