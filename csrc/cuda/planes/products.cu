// Splits float32 matrices into planes, and multiplies planes (ops/planes.h).
#include "../engine.h"
#include "monoidreduce/device/contraction/product_epilogue_sm90.cuh"
#include "monoidreduce/device/contraction/split_planes.cuh"
#include "monoidreduce/launch/contraction_sm90.cuh"
#include "monoidreduce/launch/dense_lines.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/ops/planes.h"

namespace monoidreduce::cuda {
namespace {

static_assert(plane_width(1) == kPlaneStep);

FloatLines float_lines(const TensorView& x) {
  require_dense_lines(as_rows(x));
  return {static_cast<const float*>(x.data), x.stride[0], static_cast<int>(x.size[0]),
          static_cast<int>(x.size[1])};
}
template <class T>
T* data_of(const TensorView& x) {
  return static_cast<T*>(x.data);
}

}  // namespace

namespace sm90 {

template <>
void run(const RowSplit& x, const Plan&, const Launch& launch) {
  if (x.x.numel() == 0) return;
  const DeviceGuard device(x.x.cuda_device);
  launch_kernel("split_rows", &split_rows_kernel, blocks_for(x.x.size[0]), kPlaneThreads, 0, launch.stream,
                float_lines(x.x), data_of<const float>(x.by), data_of<__half>(x.out), x.out.stride[0],
                static_cast<int>(plane_width(x.x.size[1])));
}

template <>
void run(const ColumnSplit& x, const Plan&, const Launch& launch) {
  if (x.x.numel() == 0) return;
  const DeviceGuard device(x.x.cuda_device);
  const auto blocks = [](std::int64_t size, int of_block) {
    return static_cast<unsigned>((size + of_block - 1) / of_block);
  };
  const dim3 grid(blocks(x.x.size[1], 4 * kColumnLanes), blocks(x.x.size[0], kRowsOfBlock));
  const FloatLines lines = float_lines(x.x);
  launch_kernel("largest_of_columns", &largest_of_columns_kernel, grid, kPlaneThreads, 0, launch.stream,
                lines, data_of<const float>(x.by), data_of<unsigned>(x.largest));
  launch_kernel("split_columns", &split_columns_kernel, grid, kPlaneThreads, 0, launch.stream, lines,
                data_of<const float>(x.by), data_of<const unsigned>(x.largest), data_of<__half>(x.out),
                x.out.stride[0], static_cast<int>(plane_width(x.x.size[1])), data_of<float>(x.scales));
}

template <>
void run(const PlaneProduct& x, const Plan&, const Launch& launch) {
  using namespace monoidreduce::sm90;
  const std::int64_t terms = x.b.size[0];
  const TensorView out = as_rows(x.out);
  const auto multiply = [&](auto tile, const OperandPlanes& a) {
    // Sizes alone: kernels read the planes.
    FoldProblem p{.a = out, .b = transposed_rows(out)};
    p.a.size[3] = terms, p.b.size[2] = x.out.size[1], p.b.size[3] = terms;
    p.a_planes = a, p.b_planes = planes_of_lines(x.b, x.out.size[1]);
    p.b_planes.scales = nullptr;
    if (x.adds) {
      const AddEpilogue<RowFactors> epilogue{{nullptr, row_order(p)}, tensor_map(out, kSlabBoxRows)};
      contraction<float>(tile, p, epilogue, nullptr, "plane_product", launch);
    } else {
      contraction<float>(tile, p, FloatEpilogue{stores_for(tile, {out})}, nullptr, "plane_product", launch);
    }
  };
  if (!x.scales.present()) return multiply(PlaneTile<>{}, planes_of_lines(x.a, terms));
  const std::int64_t rows = x.out.size[0];
  multiply(PlaneTile<1, true>{},
           OperandPlanes{x.a, plane_width(rows), static_cast<const float*>(x.scales.data), 1, rows});
}

template <>
void run(const PlaneDots& x, const Plan&, const Launch& launch) {
  using namespace monoidreduce::sm90;
  const std::int64_t width = (x.a.size[1] - planes_width(0)) / 2;  // of a plane
  const TensorView out = as_rows(x.out);
  FoldProblem p{.a = out, .b = out};  // sizes alone: the kernel reads the planes
  p.a.size[3] = p.b.size[3] = width, p.b.size[2] = x.b.size[0];
  p.a_planes = planes_of_lines(x.a, p.width()), p.b_planes = planes_of_lines(x.b, p.width());
  contraction<float>(PlaneTile<>{}, p, FloatEpilogue{stores_for(PlaneTile<>{}, {out})}, nullptr, "plane_dots",
                     launch);
}

}  // namespace sm90
}  // namespace monoidreduce::cuda
