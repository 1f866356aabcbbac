#include "../plan/tiles.h"
#include "monoidreduce/device/simt/program_narrow.cuh"
#include "monoidreduce/device/simt/program_simt.cuh"
#include "program_passes.cuh"
#include "simt_splits.cuh"

namespace monoidreduce::cuda::simt {
namespace {

namespace narrow = monoidreduce::simt::narrow;
using monoidreduce::simt::Splits;
static_assert(narrow::kThreads == tiles::kRowThreads && narrow::kRows == tiles::kGroupRows &&
              narrow::kColumns == tiles::kRowColumns);
static_assert(kTile == tiles::kSimt.rows && kTile == tiles::kSimt.columns &&
              kBlocksPerSm<float> == tiles::kSimtBlocks);

template <class Call>
monoidreduce::simt::ProgramOperands operands_of(const Call& x) {
  const FoldProblem p = statistics_problem(x);
  return {{device_tensor(p.a), device_tensor(p.other_a)}, {device_tensor(p.b), device_tensor(p.other_b)}};
}
std::size_t tile_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? sizeof(TileMemory<double>) : sizeof(TileMemory<float>);
}

template <class Call>
narrow::Parts parts_of(const Call& x, const OwnedRows& owned) {
  return {divide_up(x.a.size[0], narrow::rows_of_block(owned.lanes)), owned.splits};
}
template <class... Arguments>
void launch_narrow(const char* name, std::int64_t kernel, std::int64_t blocks, const Launch& launch,
                   const Arguments&... arguments) {
  require(blocks <= INT32_MAX, name, ": expected at most ", INT32_MAX, " blocks, got ", blocks);
  launch_loaded(name, kernel, static_cast<unsigned>(blocks), narrow::kThreads, 0, launch.stream,
                arguments...);
}

}  // namespace

template <>
void run(const StatisticsFold& x, const Plan& plan, const Launch& launch) {
  const std::int64_t rows = x.a.size[0], tiles = divide_up(rows, kTile);
  if (tiles == 0) return;
  const DeviceGuard guard(x.a.cuda_device);
  const auto fold_tiles = [&](std::int64_t jobs, const auto&... splits) {
    launch_loaded("statistics_fold", x.kernels, blocks_for(jobs), kThreads, tile_bytes(x.a.dtype),
                  launch.stream, operands_of(x), data_of(x), results_of(x), splits...);
  };
  if (x.state_words == 0) return fold_tiles(tiles);  // a user's monoid in C++
  Splits splits = splits_of(plan, x.scratch);
  if (plan.owned_rows) {
    const narrow::Parts parts = parts_of(x, *plan.owned_rows);
    splits = {parts.parts, x.scratch.data};
    launch_narrow("statistics_fold", x.kernels, parts.row_blocks * parts.parts, launch, operands_of(x),
                  data_of(x), results_of(x), parts, splits);
  } else {
    fold_tiles(tiles * splits.count, splits);
  }
  if (splits.count > 1)
    launch_loaded("combine_states", x.kernels + 1, blocks_for(divide_up(rows, kThreads)), kThreads, 0,
                  launch.stream, results_of(x), splits);
}
template <>
void run(const StatisticsLocalGradient& x, const Plan&, const Launch& launch) {
  const std::int64_t tiles = divide_up(x.a.size[0], kTile) * divide_up(x.b.size[0], kTile);
  if (tiles == 0) return;
  const DeviceGuard guard(x.a.cuda_device);
  const monoidreduce::simt::ProgramOuts outs{
      {device_tensor(as_rows(x.out)), device_tensor(as_rows(x.other_out))}};
  launch_loaded("statistics_local_gradient", x.kernels, blocks_for(tiles), kThreads, tile_bytes(x.a.dtype),
                launch.stream, operands_of(x), data_of(x), outs);
}
template <>
void run(const StatisticsRowGradient& x, const Plan& plan, const Launch& launch) {
  check_parts(x, plan);
  const narrow::Parts parts = parts_of(x, *plan.owned_rows);
  const narrow::RowGradients to{{x.d_a.data, x.d_other_a.data},
                                x.sums.data,
                                {x.a.size[1], x.other_a.present() ? x.other_a.size[1] : 0}};
  const DeviceGuard guard(x.a.cuda_device);
  launch_narrow("statistics_row_gradient", x.kernels, parts.row_blocks * parts.parts, launch, operands_of(x),
                data_of(x), to, parts);
}

}  // namespace monoidreduce::cuda::simt
