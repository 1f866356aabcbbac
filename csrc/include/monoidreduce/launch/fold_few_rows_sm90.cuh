// Launches device/resident/fold_few_rows_sm90.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/resident/fold_few_rows_sm90.cuh"
#include "monoidreduce/fold.h"
#include "monoidreduce/launch/combine_splits.cuh"
#include "monoidreduce/launch/fold_forward_sm90.cuh"
#include "monoidreduce/launch/fold_shape.cuh"
#include "monoidreduce/launch/launch.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/packing.h"

namespace monoidreduce::sm90 {

template <class B>
BiasSource packed_bias_source(const TensorView& bias, const Packing& packing) {
  if constexpr (std::is_void_v<B>) {
    return {};
  } else {
    require_readable_lines(bias);
    return {encode_map(bias, packing.rows, BiasLine<B>::kBytes, packing.heads), packing.heads * packing.rows};
  }
}

// Forward with few rows (split-KV, PackGQA). scratch: for PartialRows, if there is more than one split. Rows: as combine_splits
// takes them.
template <class E, class Tile, class M, class Scores, class Rows>
void fold_few_rows(const M& m, Scores scores, const FoldProblem& p, const Packing& packing, const Rows& rows,
                   const FoldOutput& out, float* scratch, const Launch& launch) {
  if constexpr (kBiasedByTile<Scores>) scores.rows_share = false;  // a tile has rows of several heads
  const FoldShape shape = fold_shape(p, 1);
  const ForwardArguments arguments{.rows = tensor_map(p.a, packing.rows, packing.heads),
                                   .columns = tensor_map(p.b, Tile::kColumns),
                                   .payload = payload_map<Tile>(p.payload),
                                   .out = output_rows(out),
                                   .counter = nullptr,
                                   .shape = shape,
                                   .bias = packed_bias_source<BiasElement<Scores>>(p.bias, packing)};
  const PartialRows<M> partial = partial_rows<M>(p, packing.splits, scratch);
  const DeviceGuard device(p.a.cuda_device);
  launch_kernel("fold_few_rows_sm90", &fold_few_rows_kernel<E, Tile, M, Scores, Rows>,
                static_cast<unsigned>(std::min<std::int64_t>(packed_tiles(p, packing) * packing.splits,
                                                             multiprocessors(p.a.cuda_device))),
                Tile::kThreads,
                sizeof(ForwardMemory<Tile, BiasElement<Scores>, false, PackedJob>) + kSharedAlignment,
                launch.stream, arguments, packing, partial, m, scores, rows);
  if (packing.splits > 1)
    combine_splits<E>(m, partial, packing.splits, shape, rows, output_rows(out), launch);
}

}  // namespace monoidreduce::sm90
