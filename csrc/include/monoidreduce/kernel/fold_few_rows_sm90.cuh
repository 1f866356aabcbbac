// The forward fold on Hopper for few rows: fold_forward_sm90.cuh with one consumer, whose 64 lines are rows of all heads that
// share a column head (packed_schedule.cuh), and with columns in splits (combine_splits.cuh).
//
// The kernel is bound by reading columns and payload. Its stages fill shared memory, so that copies are always in flight.
#pragma once

#include "monoidreduce/kernel/combine_splits.cuh"
#include "monoidreduce/kernel/fold_forward_sm90.cuh"
#include "monoidreduce/kernel/packed_schedule.cuh"

namespace monoidreduce::sm90 {

// Rows: as combine_splits takes them.
template <class E, class Tile, PayloadMonoid M, class Scores, class Rows>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fold_few_rows_kernel(const __grid_constant__ ForwardArguments p, const __grid_constant__ Packing packing,
                         const __grid_constant__ PartialRows<M> partial, const __grid_constant__ M m,
                         const __grid_constant__ Scores scores, const __grid_constant__ Rows rows) {
  static_assert(Tile::kConsumers == 1 && Tile::kRows == kPackedLines);
  extern __shared__ unsigned char shared_bytes[];
  using Worker = Consumer<E, Tile, M, Scores, PackedJob>;
  auto& memory = *reinterpret_cast<typename Worker::Memory*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) memory.init();
  // Lines that no copy writes.
  for (int at = threadIdx.x * 16; at < int(sizeof memory.rows); at += Tile::kThreads * 16)
    *reinterpret_cast<uint4*>(memory.rows[0] + at) = {};
  arch::fence_async_shared();
  __syncthreads();

  const PackedSchedule<Tile::kColumns> schedule{p.shape, packing};
  if (arch::uniform(threadIdx.x / kWarpgroup) == 1) {
    if (threadIdx.x % kWarpgroup / 32 == 0 && arch::elect()) produce(p, schedule, memory);
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

template <class B>
BiasSource packed_bias_source(const TensorView& bias, const Packing& packing) {
  if constexpr (std::is_void_v<B>) {
    return {};
  } else {
    require_readable_lines(bias);
    return {encode_map(bias, packing.rows, BiasLine<B>::kBytes, packing.heads), packing.heads * packing.rows};
  }
}

// scratch: of PartialRows, where there is more than one split. Rows: as combine_splits takes them.
template <class E, class Tile, PayloadMonoid M, class Scores, class Rows>
void fold_few_rows(const M& m, Scores scores, const FoldProblem& p, const Packing& packing, const Rows& rows,
                   const TensorView& out, float* scratch, const Launch& launch) {
  if constexpr (kBiasedByTile<Scores>) scores.rows_share = false;  // a tile has rows of several heads
  const FoldShape shape(p, 1);
  const ForwardArguments arguments{.rows = tensor_map(p.a, packing.rows, packing.heads),
                                   .columns = tensor_map(p.b, Tile::kColumns),
                                   .payload = payload_map<Tile>(p.payload),
                                   .out = OutputRows(out),
                                   .counter = nullptr,
                                   .shape = shape,
                                   .bias = packed_bias_source<BiasElement<Scores>>(p.bias, packing)};
  const PartialRows<M> partial(p, packing.splits, scratch);
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("fold_few_rows_sm90", &fold_few_rows_kernel<E, Tile, M, Scores, Rows>,
                static_cast<unsigned>(std::min<std::int64_t>(packed_tiles(p, packing) * packing.splits,
                                                             multiprocessors(p.a.cuda_device))),
                Tile::kThreads,
                sizeof(ForwardMemory<Tile, BiasElement<Scores>, PackedJob>) + kSharedAlignment, launch.stream,
                arguments, packing, partial, m, scores, rows);
  if (packing.splits > 1) combine_splits<E>(m, partial, packing.splits, shape, rows, OutputRows(out), launch);
}

}  // namespace monoidreduce::sm90
