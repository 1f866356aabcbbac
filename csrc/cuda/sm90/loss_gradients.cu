// The backward pass of the losses on Hopper: dlogits of cross entropy and of a log-sum-exp, and the matrix
// products of any loss's dlogits (dX and dW).
#include "../../plan/small_tile.h"
#include "../../plan/tiles.h"
#include "../cross_entropy_passes.cuh"
#include "../element.h"
#include "../engine.h"
#include "monoidreduce/device/contraction/product_epilogue_sm90.cuh"
#include "monoidreduce/launch/contraction_schedule.h"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/ops/rows.h"

namespace monoidreduce::cuda::sm90 {
namespace {

using namespace monoidreduce::sm90;

using GradientTile = ContractionTile<256, 4>;
using SmallGradientTile = ContractionTile<128, 6>;
static_assert(kSizesOf<GradientTile> == tiles::kSm90Loss && kSizesOf<SmallGradientTile> == tiles::kSm90Small);

// Calls run(Tile{}) with the tile of 192 columns if it leaves less of the last wave of tiles empty, otherwise
// with that of 256. With 9 tiles of 256 columns instead of 12 of 192, 32 row blocks took 1.1 times as long on
// an H100.
template <bool kRowsTransposed, class Run>
void with_tile(const FoldProblem& p, Run run) {
  using Wide = ContractionTile<256, 4, 1, kRowsTransposed>;
  using Narrow = ContractionTile<192, 4, 1, kRowsTransposed>;
  const DeviceFacts& gpu = device_facts(p.a.cuda_device);
  const auto cost = [&](auto tile) {
    using Tile = decltype(tile);
    const TileSchedule s = contraction_schedule(kSizesOf<Tile>, p, gpu);
    const std::int64_t tiles = std::int64_t{s.row_blocks} * s.column_tiles;
    return (tiles + s.clusters - 1) / s.clusters * Tile::kColumns;
  };
  if (cost(Narrow{}) * 1.04 < cost(Wide{})) return run(Narrow{});
  run(Wide{});
}

// Sets the rows that are not active to 0.
template <class E>
__global__ void clear_inactive_rows(const __grid_constant__ RowOrder order, E* out, std::int64_t pitch,
                                    int width) {
  for (int place = order.counted() + blockIdx.x; place < order.rows; place += gridDim.x)
    for (int column = threadIdx.x; column < width; column += blockDim.x)
      out[order[place] * pitch + column] = static_cast<E>(0.f);
}

}  // namespace

template <>
void run(const CrossEntropyLocalGradient& x, const Plan&, const Launch& launch) {
  cross_entropy_gradient_pass<GradientTile>(x, launch);
}

template <>
void run(const LogSumExpLocalGradient& x, const Plan& plan, const Launch& launch) {
  require(plan.tile.has_value(), "plan: expected one with a tile, got ", text(plan));
  if (plan.tile->columns == SmallGradientTile::kColumns)
    return logsumexp_gradient_pass<SmallGradientTile>(x, launch);
  logsumexp_gradient_pass<GradientTile>(x, launch);
}

template <>
void run(const RowsProduct& x, const Plan&, const Launch& launch) {
  const FoldProblem p = product_problem(x);
  constexpr const char* kName = "rows_product";
  const RowFactors factors{static_cast<const float*>(x.factor.data), row_order(p)};
  const TensorView out = as_rows(x.out);
  with_element(x.a.dtype, [&](auto element) {
    using E = decltype(element);
    const auto scatter = [&]<class Out>(Out) {
      with_tile<false>(p, [&](auto tile) {
        contraction<E>(tile, p, ScatterEpilogue<Out>{factors, tensor_map(out, 1)}, nullptr, kName, launch);
      });
      if (!x.order.present()) return;
      const DeviceGuard guard(x.a.cuda_device);
      launch_kernel("clear_inactive_rows", &clear_inactive_rows<Out>, 2 * multiprocessors(x.a.cuda_device),
                    256, 0, launch.stream, factors.order, static_cast<Out*>(x.out.data), x.out.stride[0],
                    static_cast<int>(x.out.size[1]));
    };
    if (!x.adds) return x.out.dtype == DType::kFloat32 ? scatter(0.f) : scatter(E{});
    with_tile<false>(p, [&](auto tile) {
      const AddEpilogue<RowFactors> epilogue{factors, tensor_map(out, kSlabBoxRows)};
      contraction<E>(tile, p, epilogue, nullptr, kName, launch);
    });
  });
}

template <>
void run(const ColumnsProduct& x, const Plan&, const Launch& launch) {
  const FoldProblem p = product_problem(x);
  constexpr const char* kName = "columns_product";
  const TensorView outs[] = {as_rows(x.out)};
  const OneFactor factor{static_cast<const float*>(x.scale.data),
                         row_order(p.order, p.width(), p.first_place)};
  with_element(x.a.dtype, [&](auto element) {
    using E = decltype(element);
    with_tile<true>(p, [&](auto tile) {
      if (x.out.dtype == DType::kFloat32) {
        const AddEpilogue<OneFactor> adds{factor, tensor_map(outs[0], kSlabBoxRows)};
        return contraction<E>(tile, p, adds, nullptr, kName, launch);
      }
      const StoreEpilogue<E> stores{factor, stores_for(tile, outs)};
      contraction<E>(tile, p, stores, nullptr, kName, launch);
    });
  });
}

}  // namespace monoidreduce::cuda::sm90
