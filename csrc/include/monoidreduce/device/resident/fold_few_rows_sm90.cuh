// The forward fold on Hopper for few rows, as in decoding (split-KV with PackGQA). It is
// fold_forward_sm90.cuh with one consumer, whose 64 lines are rows of all heads that share a column head
// (packed_schedule.cuh). The columns are split between blocks (combine_splits.cuh).
//
// Reading columns and payload bounds the kernel. Its stages fill shared memory, so that copies are always in
// flight.
#pragma once

#include "monoidreduce/device/resident/combine_splits.cuh"
#include "monoidreduce/device/resident/fold_forward_sm90.cuh"
#include "monoidreduce/device/schedule/packed_schedule.cuh"

namespace monoidreduce::sm90 {

template <class E, class Tile, class M, class Scores, class Rows>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fold_few_rows_kernel(const __grid_constant__ ForwardArguments p, const __grid_constant__ Packing packing,
                         const __grid_constant__ PartialRows<M> partial, const __grid_constant__ M m,
                         const __grid_constant__ Scores scores, const __grid_constant__ Rows rows) {
  static_assert(Tile::kConsumers == 1 && Tile::kRows == kPackedLines);
  extern __shared__ unsigned char shared_bytes[];
  using Worker = Consumer<E, Tile, M, Scores, Rows, PackedJob>;
  auto& memory = *reinterpret_cast<typename Worker::Memory*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) memory.init();
  // Clears the lines of rows that no copy writes.
  for (int at = threadIdx.x * 16; at < int(sizeof memory.rows); at += Tile::kThreads * 16)
    *reinterpret_cast<uint4*>(memory.rows[0] + at) = {};
  arch::fence_async_shared();
  __syncthreads();

  const PackedSchedule<Tile::kColumns> schedule{p.shape, packing};
  if (arch::uniform(threadIdx.x / kWarpgroup) == 1) {
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect()) produce(p, schedule, scores, memory);
    return;
  }
  Worker consumer{m, scores, p.shape, memory, 0};
  while (true) {
    const PackedJob job = consumer.receive();
    if (job.tiles < 0) break;
    consumer.run(job);
    consumer.release_rows();
    if (packing.splits == 1)
      finish_rows<E>(m, consumer.state, consumer.sums, p.shape, job, 0, rows, p.out);
    else
      store_partial_rows<M>(consumer.state, consumer.sums, p.shape, job, 0, partial);
  }
}

}  // namespace monoidreduce::sm90
