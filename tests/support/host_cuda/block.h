// Kernels of device/simt/ on the host: what of CUDA's language they use, one block at a time.
//
// The threads of a block are fibers of one thread, which change where they wait for each other. Each round of them goes
// in the other direction, so that a barrier that is missing shows in the results. A barrier that not all reach ends the process.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#ifndef HOST_THREADS
#define HOST_THREADS 256  // of a block
#endif

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Dimension {
  unsigned x;
};

// Libraries that a process loads have a block each: of several statics of one name the loader would take the first, which
// another library made for another number of threads.
namespace {

Dimension threadIdx, blockIdx, gridDim;

namespace host {

struct Barrier {
  int arrived = 0;
  unsigned passed = 0;
};

class Block {
 public:
  static constexpr int kThreads = HOST_THREADS, kWarp = 32, kStack = 128 << 10;

  void run(const std::function<void()>& kernel) {
    kernel_ = &kernel, left_ = kThreads;
    for (unsigned t = 0; t < kThreads; ++t) {
      done_[t] = false;
      getcontext(&fibers_[t]);
      fibers_[t].uc_stack.ss_sp = stacks_.data() + std::size_t{t} * kStack;
      fibers_[t].uc_stack.ss_size = kStack;
      fibers_[t].uc_link = &scheduler_;
      makecontext(&fibers_[t], &Block::begin, 0);
    }
    for (bool forward = true; left_ > 0; forward = !forward) {
      const int events = events_;
      for (int n = 0; n < kThreads; ++n) {
        threadIdx.x = static_cast<unsigned>(forward ? n : kThreads - 1 - n);
        if (!done_[threadIdx.x]) swapcontext(&scheduler_, &fibers_[threadIdx.x]);
      }
      if (events == events_) std::fputs("a barrier that not all threads reach\n", stderr), std::abort();
    }
  }
  void wait_for_block() { wait(all_, kThreads); }
  void wait_for_warp() { wait(of_warp_[threadIdx.x / kWarp], kWarp); }

  unsigned words[kThreads];  // that threads show each other

  static Block& one() {
    static Block block;
    return block;
  }

 private:
  static void begin() {
    (*one().kernel_)();
    one().done_[threadIdx.x] = true, --one().left_, ++one().events_;
  }
  void wait(Barrier& barrier, int threads) {
    const unsigned passed = barrier.passed, thread = threadIdx.x;
    if (++barrier.arrived == threads) {
      barrier.arrived = 0, ++barrier.passed, ++events_;
      return;
    }
    while (barrier.passed == passed) swapcontext(&fibers_[thread], &scheduler_);
  }

  const std::function<void()>* kernel_ = nullptr;
  ucontext_t scheduler_, fibers_[kThreads];
  std::vector<char> stacks_ = std::vector<char>(std::size_t{kThreads} * kStack);
  bool done_[kThreads];
  int left_ = 0, events_ = 0;
  Barrier all_, of_warp_[kThreads / kWarp];
};

// What op makes of the words of `count` threads from `first` on.
template <class Op>
unsigned fold_words(unsigned first, unsigned count, unsigned from, Op op) {
  for (unsigned t = first; t < first + count; ++t) from = op(from, Block::one().words[t]);
  return from;
}
template <class Op>
unsigned agree(unsigned word, unsigned from, Op op) {
  Block& block = Block::one();
  block.words[threadIdx.x] = word;
  block.wait_for_block();
  const unsigned found = fold_words(0, Block::kThreads, from, op);
  block.wait_for_block();
  return found;
}

// kernel() by each of so many blocks.
inline void launch(unsigned blocks, const std::function<void()>& kernel) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) Block::one().run(kernel);
}

}  // namespace host
}  // namespace

inline void __syncthreads() { host::Block::one().wait_for_block(); }
inline int __syncthreads_and(int holds) {
  return static_cast<int>(host::agree(holds != 0, 1, [](unsigned a, unsigned b) { return a & b; }));
}
inline int __syncthreads_or(int holds) {
  return static_cast<int>(host::agree(holds != 0, 0, [](unsigned a, unsigned b) { return a | b; }));
}
inline unsigned __shfl_xor_sync(unsigned, unsigned word, int lane_mask) {
  host::Block& block = host::Block::one();
  block.words[threadIdx.x] = word;
  block.wait_for_warp();
  const unsigned found = block.words[threadIdx.x ^ static_cast<unsigned>(lane_mask)];
  block.wait_for_warp();
  return found;
}
inline int __any_sync(unsigned, int holds) {
  host::Block& block = host::Block::one();
  block.words[threadIdx.x] = holds != 0;
  block.wait_for_warp();
  const unsigned first = threadIdx.x / host::Block::kWarp * host::Block::kWarp;
  const unsigned found =
      host::fold_words(first, host::Block::kWarp, 0, [](unsigned a, unsigned b) { return a | b; });
  block.wait_for_warp();
  return static_cast<int>(found);
}

template <class T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
template <class T>
T atomicMax(T* to, T value) {
  const T before = *to;
  *to = before < value ? value : before;
  return before;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Shared memory, as kernels declare it.
namespace monoidreduce::simt {
__attribute__((visibility("hidden"))) inline __align__(32) unsigned char shared_bytes[160 << 10];
}
