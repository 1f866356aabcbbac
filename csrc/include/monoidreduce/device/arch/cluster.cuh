// Clusters: blocks that run at the same time on neighbouring SMs and reach each other's shared memory.
#pragma once

#include "monoidreduce/device/arch/barrier.cuh"

namespace monoidreduce::arch {

// The number of the calling block in its cluster.
__device__ __forceinline__ int block_of_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of a cluster, in two halves.
__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Where another block of the cluster has what the calling block has at p.
__device__ __forceinline__ SharedAddress in_block(const void* p, int block) {
  SharedAddress at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(block));
  return at;
}
// What is in any block.
__device__ __forceinline__ unsigned load_from_block(SharedAddress at) {
  unsigned word;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}
// On an mbarrier of any block. Releases to the calling block only, which suffices after reads. A release to
// the cluster would wait for all of the thread's earlier accesses to memory.
__device__ __forceinline__ void arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

}  // namespace monoidreduce::arch
