// Clusters: blocks that run at the same time on neighbouring SMs and can access each other's shared memory.
#pragma once

#include "monoidreduce/device/arch/barrier.cuh"

namespace monoidreduce::arch {

// The rank of the calling block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of a cluster, as separate arrive and wait.
__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The address, in the shared memory of another block of the cluster, that corresponds to p in the calling
// block.
__device__ __forceinline__ SharedAddress map_to_rank(const void* p, int block) {
  SharedAddress at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(block));
  return at;
}
// Loads a word from the shared memory of any block of the cluster.
__device__ __forceinline__ unsigned load_from_block(SharedAddress at) {
  unsigned word;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}
// Arrives at an mbarrier of any block of the cluster. The release has block scope, which suffices after
// reads: a release of cluster scope would wait for all of the thread's earlier memory accesses.
__device__ __forceinline__ void arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

}  // namespace monoidreduce::arch
