// The gradients of rows of users' programs on float32 operands.
#include "../program_passes.cuh"
#include "monoidreduce/device/resident/row_gradient_planes_sm90.cuh"
#include "monoidreduce/launch/plane_maps.cuh"

namespace monoidreduce::cuda::planes {

using namespace monoidreduce::sm90;

namespace {

template <int kWidth>
void row_gradient(const StatisticsRowGradient& x, std::int64_t parts, const Launch& launch) {
  using Tile = RowGradientTile<kWidth>;
  static_assert(tiles::kRowGradientPlanes.rows == Tile::kRows &&
                tiles::kRowGradientPlanes.columns == Tile::kColumns);
  static_assert(planes_width(kWidth) * sizeof(__half) == RowGradientMemory<Tile>::Operand::kLineOfBoth);
  const DeviceGuard guard(x.a.cuda_device);
  const std::int64_t row_blocks = parts_of(x.a.size[0], Tile::kRows);
  const RowGradientArguments arguments{.rows = plane_maps(as_rows(x.row_planes)),
                                       .columns = plane_maps(as_rows(x.column_planes)),
                                       .row_blocks = static_cast<int>(row_blocks),
                                       .parts = static_cast<int>(parts),
                                       .gradient = static_cast<float*>(x.d_a.data),
                                       .width = static_cast<int>(x.a.size[1]),
                                       .sums = static_cast<float*>(x.sums.data)};
  launch_loaded("statistics_row_gradient", x.kernels, blocks_for(row_blocks * parts), Tile::kThreads,
                sizeof(RowGradientMemory<Tile>) + kSharedAlignment, launch.stream, arguments, data_of(x));
}

}  // namespace

template <>
void run(const StatisticsRowGradient& x, const Plan& plan, const Launch& launch) {
  check_parts(x, plan);
  if (x.a.size[1] <= 64)
    row_gradient<64>(x, plan.owned_rows->splits, launch);
  else
    row_gradient<128>(x, plan.owned_rows->splits, launch);
}

}  // namespace monoidreduce::cuda::planes
