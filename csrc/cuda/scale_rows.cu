// Scales rows by a factor each, and gathers or scatters them by an order (RowScaling of ops/rows.h).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "monoidreduce/launch/dense_lines.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/ops/rows.h"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 256, kVector = 8;  // kVector: elements that a thread reads at a time

template <class T>
struct alignas(16) Vector {
  T elements[kVector];
};

// Gathers: rows is [rows, width], out [places, width] in the order. With `scatters` it is the other way
// round. Rows that are scaled in place by 1 are neither read nor written. pitch, out_pitch: elements between lines. factors: [places], or null. vectors: how many there are in
// all.
template <class T, class U>
__global__ void __launch_bounds__(kThreads)
    scale_rows_kernel(const T* rows, std::int64_t pitch, const float* factors, U* out, std::int64_t out_pitch,
                      const __grid_constant__ RowOrder order, bool scatters, std::int64_t vectors,
                      int vectors_of_row) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const std::int64_t place = i / vectors_of_row, column = i % vectors_of_row * kVector;
  const std::int64_t row = order[static_cast<int>(place)];
  const bool active = place < order.counted();
  const float factor = !active ? 0.f : factors == nullptr ? 1.f : factors[place];
  if (factor == 1.f && static_cast<const void*>(rows) == out) return;
  const auto in = *reinterpret_cast<const Vector<T>*>(rows + (scatters ? place : row) * pitch + column);
  Vector<U> scaled;
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    scaled.elements[k] = static_cast<U>(factor == 0.f ? 0.f : factor * static_cast<float>(in.elements[k]));
  *reinterpret_cast<Vector<U>*>(out + (scatters ? row : place) * out_pitch + column) = scaled;
}

// Calls run(T{}) with the type of the elements.
template <class Run>
void with_type(DType dtype, Run run) {
  if (dtype == DType::kFloat32) return run(float{});
  if (dtype == DType::kBFloat16) return run(__nv_bfloat16{});
  run(__half{});
}

}  // namespace

template <>
void run(const RowScaling& x, const Launch& launch) {
  for (const TensorView& t : {x.x, x.out}) require_dense_lines(as_rows(t));
  const DeviceGuard device(x.x.cuda_device);
  const std::int64_t places = x.scatters ? x.x.size[0] : x.out.size[0],
                     vectors = places * x.x.size[1] / kVector;
  if (vectors == 0) return;
  with_type(x.x.dtype, [&](auto from) {
    with_type(x.out.dtype, [&](auto to) {
      using T = decltype(from);
      using U = decltype(to);
      launch_kernel("scale_rows", &scale_rows_kernel<T, U>, blocks_for((vectors + kThreads - 1) / kThreads),
                    kThreads, 0, launch.stream, static_cast<const T*>(x.x.data), x.x.stride[0],
                    data<float>(x.factor), data<U>(x.out), x.out.stride[0],
                    row_order(x.order, places, x.first_place), x.scatters, vectors,
                    static_cast<int>(x.x.size[1] / kVector));
    });
  });
}

}  // namespace monoidreduce::cuda
