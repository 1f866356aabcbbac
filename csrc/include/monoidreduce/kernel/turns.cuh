// Turns of blocks that add to the same floats, so that sums have one order and the same bits in every run.
#pragma once

#include <cstdint>

#include "monoidreduce/arch/async_copy.cuh"
#include "monoidreduce/arch/flag.cuh"

namespace monoidreduce {

struct Turns {
  static constexpr int kRows = 8;  // that one word is for, at least

  // How many jobs have been taken; then [batch, heads, of_head], how many have added. 0 at first. Null: they add in any order.
  unsigned* words = nullptr;
  int of_head = 0;

  Turns() = default;
  Turns(float* scratch, std::int64_t padded_rows)
      : words(reinterpret_cast<unsigned*>(scratch)), of_head(static_cast<int>(padded_rows / kRows)) {}
  // Of scratch.
  static std::int64_t words_of(std::int64_t batch_heads, std::int64_t padded_rows) {
    return 1 + batch_heads * (padded_rows / kRows);
  }

  // The number of the calling block's job. Where blocks wait for each other it is their number in the order in which they
  // start: those with a smaller one, whom alone a block waits for, are under way. shared: a word that the block shares.
  __device__ __forceinline__ int job(int* shared) const {
    if (words == nullptr) return blockIdx.x;
    if (threadIdx.x == 0) *shared = static_cast<int>(atomicAdd(words, 1u));
    __syncthreads();
    return *shared;
  }
  // By a warp, of the rows from row0 on, or its share of them: until so many have added to it. What they added is seen after it.
  __device__ __forceinline__ void await(std::int64_t batch_head, int row0, int share, unsigned before) const {
    if (words == nullptr) return;
    while (arch::load_acquire(word(batch_head, row0, share)) != before) {
    }
    __syncwarp();
  }
  // When the warp has added.
  __device__ __forceinline__ void pass(std::int64_t batch_head, int row0, int share) const {
    if (words == nullptr) return;
    __syncwarp();
    if (arch::thread_again() % 32 == 0) arch::add_release(word(batch_head, row0, share), 1);
  }

 private:
  // 2^32 words are for more rows than any GPU holds.
  __device__ __forceinline__ unsigned* word(std::int64_t batch_head, int row0, int share) const {
    const unsigned head = static_cast<unsigned>(batch_head);
    return words + 1 + (head * of_head + row0 / kRows + share);
  }
};

}  // namespace monoidreduce
