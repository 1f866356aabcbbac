#include "../plan/tiles.h"
#include "monoidreduce/device/simt/program_narrow.cuh"
#include "monoidreduce/device/simt/program_simt.cuh"
#include "program_passes.cuh"

namespace monoidreduce::cuda::simt {
namespace {

namespace narrow = monoidreduce::simt::narrow;
static_assert(narrow::kThreads == tiles::kRowThreads && narrow::kRows == tiles::kGroupRows &&
              narrow::kColumns == tiles::kRowColumns);

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

void fold_narrow(const StatisticsFold& x, const OwnedRows& owned, const Launch& launch) {
  const narrow::Parts parts = parts_of(x, owned);
  launch_narrow("statistics_fold", x.kernels, parts.row_blocks * parts.parts, launch, operands_of(x),
                data_of(x), results_of(x), parts, x.scratch.data);
  if (parts.parts > 1)
    launch_narrow("combine_parts", x.kernels + 1, divide_up(x.a.size[0], narrow::kThreads), launch,
                  results_of(x), parts.parts, x.scratch.data);
}

}  // namespace

template <>
void run(const StatisticsFold& x, const Plan& plan, const Launch& launch) {
  const std::int64_t tiles = divide_up(x.a.size[0], kTile);
  if (tiles == 0) return;
  const DeviceGuard guard(x.a.cuda_device);
  if (plan.owned_rows) return fold_narrow(x, *plan.owned_rows, launch);
  launch_loaded("statistics_fold", x.kernels, blocks_for(tiles), kThreads, tile_bytes(x.a.dtype),
                launch.stream, operands_of(x), data_of(x), results_of(x));
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
