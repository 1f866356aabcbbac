// Bulk copies between global and shared memory by TMA. One thread issues a copy for all.
#pragma once

#include "monoidreduce/device/arch/barrier.cuh"

namespace monoidreduce::arch {

// A CUtensorMap: base, sizes, strides, box and swizzle of a tensor of four dimensions (tensor_map.cuh encodes
// it). It is passed to kernels by value, as a __grid_constant__.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Coordinates of the first element of the box that TMA copies, innermost dimension of the tensor first.
struct Box {
  int inner, row, head, batch;
};

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Loads a box. Elements outside the tensor arrive as zeros, and count as bytes of the mbarrier.
__device__ __forceinline__ void load(void* shared, const TensorMap& map, Box at, Mbarrier* arrived) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(at.inner), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(shared_address(arrived))
      : "memory");
}
// Loads a box into the same place in several blocks of the cluster, those whose bits are set in `blocks`
// (multicast). Each block's own mbarrier counts the bytes.
__device__ __forceinline__ void load_to_blocks(void* shared, const TensorMap& map, Box at, Mbarrier* arrived,
                                               unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(at.inner), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(shared_address(arrived)),
      "h"(blocks)
      : "memory");
}
// Stores a box. Elements outside the tensor are not written.
__device__ __forceinline__ void store(const TensorMap& map, Box at, const void* shared) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
      "r"(at.inner), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(shared_address(shared))
      : "memory");
}
// Stores a box of data that is not read again soon: it is the first to be evicted from the L2 cache.
__device__ __forceinline__ void store_streaming(const TensorMap& map, Box at, const void* shared) {
  unsigned long long evict_first;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint "
      "[%0, {%1, %2, %3, %4}], [%5], %6;" ::"l"(&map),
      "r"(at.inner), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(shared_address(shared)), "l"(evict_first)
      : "memory");
}

// Loads contiguous bytes. The addresses and the size are multiples of 16.
__device__ __forceinline__ void load(void* shared, const void* global, int bytes, Mbarrier* arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(arrived))
      : "memory");
}
// Adds a box to the tensor, each element atomically. Elements outside the tensor are dropped.
__device__ __forceinline__ void reduce_add(const TensorMap& map, Box at, const void* shared) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(&map),
      "r"(at.inner), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(shared_address(shared))
      : "memory");
}

// Makes one group of the thread's stores and reductions since the last commit.
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kGroups groups are unfinished; the writes of the others are then visible.
template <int kGroups>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}
// Waits until at most kGroups groups still read shared memory, so that the others' sources may be
// overwritten.
template <int kGroups>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

}  // namespace monoidreduce::arch
