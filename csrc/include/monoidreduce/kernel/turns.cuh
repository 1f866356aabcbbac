// Turns of blocks that add to the same floats, so that sums have one order and the same bits in every run.
#pragma once

#include <cstdint>

#include "monoidreduce/arch/async_copy.cuh"
#include "monoidreduce/arch/flag.cuh"
#include "monoidreduce/kernel/launch.cuh"

namespace monoidreduce {

struct Turns {
  static constexpr int kRows = 8;  // that one word is for, at least

  // How many blocks have started; then [batch, heads, of_head], how many have added. Null: they add in any order.
  unsigned* words;
  int of_head;

  static std::int64_t words_of(std::int64_t batch_heads, std::int64_t padded_rows) {
    return 1 + batch_heads * (padded_rows / kRows);
  }
  void clear(std::int64_t batch_heads, void* stream) const {
    if (words)
      check_cuda(cudaMemsetAsync(words, 0, (1 + batch_heads * of_head) * sizeof *words,
                                 static_cast<cudaStream_t>(stream)),
                 "cudaMemsetAsync");
  }

  // The number of the calling block's job. Where blocks wait for each other it is their number in the order in which they
  // start: those with a smaller one, whom alone a block waits for, are under way. shared: a word that the block shares.
  __device__ __forceinline__ int job(int* shared) const {
    if (words == nullptr) return blockIdx.x;
    if (threadIdx.x == 0) *shared = static_cast<int>(atomicAdd(words, 1u));
    __syncthreads();
    return *shared;
  }
  // By a warp, of its share of the rows from row0 on: until so many have added to it. What they added is seen after it.
  __device__ __forceinline__ void await(std::int64_t batch_head, int row0, unsigned before) const {
    if (words == nullptr) return;
    while (arch::load_acquire(of_warp(batch_head, row0)) != before) {
    }
    __syncwarp();
  }
  // When the warp has added.
  __device__ __forceinline__ void pass(std::int64_t batch_head, int row0) const {
    if (words == nullptr) return;
    __syncwarp();
    if (arch::thread_again() % 32 == 0) arch::add_release(of_warp(batch_head, row0), 1);
  }

 private:
  // Computed again each time: kept, it takes registers of the products in between. 2^32 words are for more rows than any GPU
  // holds.
  __device__ __forceinline__ unsigned* of_warp(std::int64_t batch_head, int row0) const {
    const unsigned head = static_cast<unsigned>(batch_head);
    return words + 1 + (head * of_head + row0 / kRows + arch::thread_again() / 32);
  }
};

}  // namespace monoidreduce
