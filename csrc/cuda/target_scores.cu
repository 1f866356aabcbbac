// Scores of a few classes of each row, and their part of the dlogits (ops/target_scores.h).
#include "monoidreduce/ops/target_scores.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "monoidreduce/device/warp/lanes.cuh"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 32;

template <class E>
struct Lines {
  const E* data;
  std::int64_t pitch, step;  // between lines, and between the elements of a line
};
template <class E>
Lines<E> lines_of(const TensorView& t) {
  return {static_cast<const E*>(t.data), t.stride[0], t.stride[1]};
}

// A warp computes one score. kVector: adjacent elements that a lane reads at a time.
template <class E, class R, int kVector>
__global__ void __launch_bounds__(kThreads)
    target_scores_kernel(Lines<E> x, Lines<E> weight, const std::int64_t* target, R* scores,
                         std::int64_t count, std::int64_t targets_of_row, std::int64_t first_class,
                         std::int64_t classes, std::int64_t width) {
  struct alignas(sizeof(E) * kVector) Vector {
    E elements[kVector];
  };
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  if (i >= count) return;
  const std::int64_t c = target[i] - first_class;
  R sum = R(0);
  if (0 <= c && c < classes) {
    const E *const a = x.data + i / targets_of_row * x.pitch, *const b = weight.data + c * weight.pitch;
#pragma unroll 4
    for (std::int64_t d = threadIdx.x % kLanes * kVector; d < width; d += kLanes * kVector) {
      const auto left = *reinterpret_cast<const Vector*>(a + d * x.step);
      const auto right = *reinterpret_cast<const Vector*>(b + d * weight.step);
#pragma unroll
      for (int n = 0; n < kVector; ++n)
        sum += static_cast<R>(left.elements[n]) * static_cast<R>(right.elements[n]);
    }
  }
  sum = reduce_lanes<kLanes>(sum, [](R a, R b) { return a + b; });
  if (threadIdx.x % kLanes == 0) scores[i] = sum;
}

template <class E>
__global__ void __launch_bounds__(kThreads)
    target_dlogits_kernel(const float* values, const std::int64_t* target, E* dlogits, std::int64_t pitch,
                          const __grid_constant__ RowOrder order, std::int64_t count,
                          std::int64_t targets_of_row, std::int64_t first_class, std::int64_t classes) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const std::int64_t place = i / targets_of_row;
  if (place >= order.counted()) return;
  const std::int64_t from = order[static_cast<int>(place)] * targets_of_row + i % targets_of_row,
                     c = target[from] - first_class;
  if (0 <= c && c < classes) dlogits[place * pitch + c] = static_cast<E>(values[from]);
}

// Calls run(T{}) with the type of the elements.
template <class Run>
void with_type(DType dtype, Run run) {
  if (dtype == DType::kFloat64) return run(double{});
  if (dtype == DType::kFloat32) return run(float{});
  if (dtype == DType::kBFloat16) return run(__nv_bfloat16{});
  run(__half{});
}

bool has_vectors(const TensorView& t, std::int64_t vector) {
  return t.stride[1] == 1 && t.size[1] % vector == 0 && t.stride[0] % vector == 0 &&
         reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
}

}  // namespace

template <>
void run(const TargetScores& x, const Launch& launch) {
  const std::int64_t count = x.target.size[0] * x.target.size[1];
  if (count == 0) return;
  const DeviceGuard device(x.x.cuda_device);
  with_type(x.x.dtype, [&](auto element) {
    with_accumulation(x.x.dtype, [&](auto zero) {
      using E = decltype(element);
      using R = decltype(zero);
      constexpr int kVector = 16 / sizeof(E);
      const auto run = [&](auto kernel) {
        launch_kernel("target_scores", kernel, blocks_for((count * kLanes + kThreads - 1) / kThreads),
                      kThreads, 0, launch.stream, lines_of<E>(x.x), lines_of<E>(x.weight),
                      data<std::int64_t>(x.target), data<R>(x.scores), count, x.target.size[1], x.first_class,
                      x.weight.size[0], x.weight.size[1]);
      };
      if (has_vectors(x.x, kVector) && has_vectors(x.weight, kVector))
        return run(&target_scores_kernel<E, R, kVector>);
      run(&target_scores_kernel<E, R, 1>);
    });
  });
}

template <>
void run(const TargetDlogits& x, const Launch& launch) {
  const std::int64_t count = x.target.size[0] * x.target.size[1];
  if (count == 0) return;
  const DeviceGuard device(x.dlogits.cuda_device);
  with_type(x.dlogits.dtype, [&](auto element) {
    using E = decltype(element);
    launch_kernel("target_dlogits", &target_dlogits_kernel<E>, blocks_for((count + kThreads - 1) / kThreads),
                  kThreads, 0, launch.stream, data<float>(x.values), data<std::int64_t>(x.target),
                  data<E>(x.dlogits), x.dlogits.stride[0], row_order(x.order, x.target.size[0], 0), count,
                  x.target.size[1], x.first_class, x.dlogits.size[1]);
  });
}

}  // namespace monoidreduce::cuda
