// Rows of many stored scores (jsd_rows.cuh), each taken by a cluster of blocks. So few rows are in use at a
// time that they stay in the L2 cache: only the first of the three passes over a row reads memory.
#pragma once

#include "monoidreduce/device/arch/cluster.cuh"
#include "monoidreduce/device/simt/jsd_rows.cuh"

namespace monoidreduce::simt {

// A cluster as a team.
template <int kBlocks_, int kThreadsOfBlock>
struct ClusterTeam {
  static constexpr int kBlocks = kBlocks_, kThreads = kBlocks * kThreadsOfBlock;
  // Bytes of shared memory for values of type T.
  template <class T>
  static constexpr int kSharedBytes = (kThreadsOfBlock / 32 + 2) * static_cast<int>(sizeof(T));
  int block = arch::cluster_rank();

  __device__ __forceinline__ int thread() const { return block * kThreadsOfBlock + threadIdx.x; }
  __device__ __forceinline__ std::int64_t number() const { return blockIdx.x / kBlocks; }
  __device__ __forceinline__ std::int64_t teams() const { return gridDim.x / kBlocks; }
  __device__ __forceinline__ void sync() const { arch::arrive_cluster(), arch::wait_cluster(); }
  // kPlace: where a block publishes its value: one of two places, alternately. All blocks have read one
  // before the other is written again.
  template <int kPlace, class T, class Op>
  __device__ __forceinline__ T reduce(T value, Op op) const {
    extern __shared__ __align__(32) unsigned char shared_bytes[];
    T* const shown = reinterpret_cast<T*>(shared_bytes) + kThreadsOfBlock / 32 + kPlace;
    value = reduce_block<kThreadsOfBlock>(value, op);
    if (threadIdx.x == 0) *shown = value;
    sync();
    unsigned words[sizeof(T) / sizeof(unsigned)];
    const arch::SharedAddress there = arch::map_to_rank(shown, threadIdx.x % kBlocks);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(unsigned)); ++i)
      words[i] = arch::load_from_block(there + i * static_cast<int>(sizeof(unsigned)));
    std::memcpy(&value, words, sizeof(T));
    value = reduce_lanes<kBlocks>(value, op);
    std::memcpy(words, &value, sizeof(T));  // from one lane: others may have rounded in another order
#pragma unroll
    for (unsigned& word : words) word = __shfl_sync(0xffffffffu, word, 0);
    std::memcpy(&value, words, sizeof(T));
    return value;
  }
  // A block must not exit while others read the value that it published.
  __device__ __forceinline__ void finish() const { sync(); }
};

template <class Math, int kBlocks, int kThreads>
__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kThreads, 2)
    jsd_rows_of_cluster(const Jsd<Math> jsd, const ScorePair scores, const ActiveRows counted, float* losses,
                        JsdRow* stats, const float* factor) {
  jsd_rows(ClusterTeam<kBlocks, kThreads>{}, jsd, scores, counted, losses, stats, factor);
}

}  // namespace monoidreduce::simt
