#include "monoidreduce/device/simt/program_simt.cuh"
#include "program_passes.cuh"

namespace monoidreduce::cuda::simt {
namespace {

monoidreduce::simt::ProgramOperands operands_of(const FoldProblem& p) {
  return {{device_tensor(p.a), device_tensor(p.other_a)}, {device_tensor(p.b), device_tensor(p.other_b)}};
}
std::size_t tile_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? sizeof(TileMemory<double>) : sizeof(TileMemory<float>);
}

}  // namespace

void statistics_fold(const StatisticsFold& x, const Plan&, const Launch& launch) {
  const std::int64_t tiles = divide_up(x.a.size[0], kTile);
  if (tiles == 0) return;
  const DeviceGuard guard(x.a.cuda_device);
  launch_loaded("statistics_fold", x.kernels, blocks_for(tiles), kThreads, tile_bytes(x.a.dtype),
                launch.stream, operands_of(statistics_problem(x)), data_of(x), results_of(x));
}
void statistics_local_gradient(const StatisticsLocalGradient& x, const Plan&, const Launch& launch) {
  const std::int64_t tiles = divide_up(x.a.size[0], kTile) * divide_up(x.b.size[0], kTile);
  if (tiles == 0) return;
  const DeviceGuard guard(x.a.cuda_device);
  const monoidreduce::simt::ProgramOuts outs{
      {device_tensor(as_rows(x.out)), device_tensor(as_rows(x.other_out))}};
  launch_loaded("statistics_local_gradient", x.kernels, blocks_for(tiles), kThreads, tile_bytes(x.a.dtype),
                launch.stream, operands_of(statistics_problem(x)), data_of(x), outs);
}

}  // namespace monoidreduce::cuda::simt
